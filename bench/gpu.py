"""Everything that is measured on a GPU, in one run: training and decoding, ours beside the peers.

    python -m bench.gpu [--quick] [--out FOLDER]
    python -m bench.gpu_training --help        python -m bench.gpu_decoding --help        # either part alone

The parts are processes of their own, one after the other, so that neither finds the other's memory or compiled code.
Compiling the peers' steps for every length bucket takes minutes: about 15 in all, or 5 with --quick.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and the peers as they are, not compiled")
    parser.add_argument("--out", type=Path, help="a folder for the numbers")
    given = parser.parse_args()
    if machine.accelerator() is None:
        sys.exit("no GPU that PyTorch can use is here: `make bench` measures on a CPU")
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
