"""One process of a job that trains a small run under a number of steps; run by test_resharding.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from small_runs import small, train_run

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # of the weights, so that sums in another order do not matter
    train_run(small(Path(sys.argv[1]), **json.loads(sys.argv[3])), Path(sys.argv[2]))
