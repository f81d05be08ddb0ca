"""Run all GPU benchmarks: training and decoding, regard and other libraries.

    python -m bench.gpu [--quick] [--out FOLDER]
    python -m bench.gpu_training --help        python -m bench.gpu_decoding --help        # one part only

The parts run in separate processes, one after the other, so that they share neither memory nor compiled code.
Compiling the other libraries' steps for every length bucket takes minutes: about 15 in total, or 5 with --quick.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, other libraries eager only")
    parser.add_argument("--out", type=Path, help="directory for the results")
    given = parser.parse_args()
    if machine.accelerator() is None:
        sys.exit("PyTorch finds no GPU: use `make bench` to measure on a CPU")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    files = {"gpu_training": "training.json", "gpu_decoding": "decoding.txt"}
    worst = 0
    for module, file in files.items():
        command = [sys.executable, "-m", f"bench.{module}", *(["--quick"] if given.quick else [])]
        command += ["--out", str(given.out / file)] if given.out else []
        print(f"== {' '.join(command[2:])}", flush=True)
        worst = max(worst, subprocess.run(command).returncode)
    sys.exit(worst)


if __name__ == "__main__":
    main()
