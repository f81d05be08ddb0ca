"""A corpus larger than one would like to hold in memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

PAIRS = int(os.environ.get("REGARD_LARGE_PAIRS", "5000000"))

SCRIPT = """
import json, sys
from itertools import islice

def anonymous():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) // 1024

from regard.data.packing import Packer, StreamPosition
from regard.data.token_cache import build, learn_tokenizers
from regard.recipes import load

peaks = {"imports": anonymous()}
recipe = load(sys.argv[1])
tokenizers = learn_tokenizers(recipe)
peaks["vocabulary"] = anonymous()
most = [0]
stores = build(recipe, *tokenizers, progress=lambda name, count: most.append(anonymous()))
peaks["cache"] = max(most)
packer = Packer(stores, [1.0], target_budget=4096, seed=1)
for batch, position in islice(packer.batches(StreamPosition()), 500):
    most.append(anonymous())
peaks["packing"] = max(most[1:])
for batch, position in islice(packer.batches(StreamPosition(0, 5000)), 10):
    most.append(anonymous())
peaks["resuming"] = max(most[1:])
print(json.dumps({"pairs": sum(map(len, stores)), "megabytes": peaks}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to see anonymous memory")
def test_five_million_pairs_need_less_than_two_gigabytes(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(20_000)]
    with open(tmp_path / "x", "w") as source, open(tmp_path / "y", "w") as target:
        for _ in range(PAIRS):
            n = rng.randint(3, 12)
            source.write(" ".join(rng.choices(words, k=n)) + "\n")
            target.write(" ".join(rng.choices(words, k=n)) + "\n")
    recipe = tmp_path / "large.toml"
    recipe.write_text('[data]\nsource = "x"\ntarget = "y"\n')
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(recipe)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    print(f"\nanonymous memory, MB: {found}")
    assert found["pairs"] == PAIRS
    assert max(found["megabytes"].values()) < 2000
