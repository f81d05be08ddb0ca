"""The memory that an import takes: one copy of the weights and one of the files that they come in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import locally_trained as trained
import pytest
import torch
from test_decoders import LLAMA2, llama2
from test_huggingface import transformers

MEASURED = """
import sys, threading
from regard.interop import import_folder

def anonymous():  # in bytes; what is mapped from files does not count, since the system can drop it
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

before = peak = anonymous()
ended = threading.Event()

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
import_folder(*sys.argv[1:])
ended.set()
thread.join()
print(peak - before)
"""
SETTINGS = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8)
SLACK = 40e6  # of imports of Python, and of the allocator


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_an_import_holds_one_copy_of_the_weights_and_one_shard(tmp_path: Path) -> None:
    size = trained.save(llama2(), tmp_path / "theirs", **LLAMA2)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=size, **SETTINGS)).bfloat16()
    weights = model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in weights.parameters():
            weight.fill_(0.5)
    weights.save_pretrained(tmp_path / "theirs", max_shard_size="60MB")
    shards = [file.stat().st_size for file in (tmp_path / "theirs").glob("*.safetensors")]
    assert len(shards) >= 4
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "theirs"), str(tmp_path / "run")]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    print(f"{sum(shards) / 1e6:.0f} MB of weights, {max(shards) / 1e6:.0f} MB in a shard: {peak / 1e6:.0f} MB")
    assert 0.5 * sum(shards) < peak < sum(shards) + max(shards) + SLACK
