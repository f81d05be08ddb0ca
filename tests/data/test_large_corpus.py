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

from regard.data.packing import Packer
from regard.data.stream import StreamPosition
from regard.data.token_cache import build
from regard.data.vocabulary import learn_tokenizers
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


HUGE = """
import json, sys
from itertools import islice
import numpy as np
from regard.data.packing import Packer
from regard.data.token_store import CorpusReport, Ragged, TokenStore
from regard.data.windows import TokenWindows

TOKENS, LENGTH = int(sys.argv[2]), 27

class Offsets:
    # Multiples of 27, which are not stored: a file of them would take gigabytes of the test's disk.
    def __len__(self):
        return TOKENS // LENGTH + 1

    def __getitem__(self, which):
        if isinstance(which, slice):
            which = np.arange(*which.indices(len(self)))
        return which * LENGTH

    def __array__(self, dtype=None, copy=None):
        return np.arange(len(self)) * LENGTH

def anonymous():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) // 1024

ids = np.asarray(np.memmap(sys.argv[1], np.uint16, "r", shape=(TOKENS,)))
side = Ragged(ids, Offsets())
store = TokenStore(side, side, CorpusReport(len(side), 0, 0, TOKENS, TOKENS))
peak = [0]
streams = [
    Packer([store], [1.0], target_budget=4096, seed=1, static=True),
    TokenWindows([store], [1.0], context=1024, batch_tokens=4096, seed=1),
]
for stream in streams:
    for planned in islice(stream.plan(), 3000):
        peak.append(anonymous())
    assert planned.read().num_targets
print(json.dumps(max(peak)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to see anonymous memory")
def test_ten_billion_tokens_need_little_more_memory_than_a_hundred_million(tmp_path):
    """Not 100 times as much: 370 million pairs are planned in sections of 4 million (100 million tokens are one)."""
    peaks = []
    for tokens in (10**8, 10**10):
        file = tmp_path / "ids"
        with open(file, "wb") as sparse:
            sparse.truncate(2 * tokens)  # takes no space on disk
        command = [sys.executable, "-c", HUGE, str(file), str(tokens)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        peaks.append(json.loads(run.stdout))
    print(f"\nanonymous memory, MB: {peaks}")
    assert peaks[1] < peaks[0] + 300
