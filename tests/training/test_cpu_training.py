"""Optimisations for training on a CPU change no result."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from regard.devices import held_memory
from regard.nn import linear_cross_entropy, losses

CPU = torch.device("cpu")


def test_a_loss_computed_in_chunks_equals_the_loss_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x, table = torch.randn(150, 6, requires_grad=True), torch.randn(20, 6, requires_grad=True)
    labels, loss_mask = torch.randint(0, 20, (150,)), torch.rand(150) < 0.8

    def gradients() -> tuple[torch.Tensor, ...]:
        loss = linear_cross_entropy.linear_cross_entropy(x, table, None, labels, loss_mask, 0.1)
        return loss.detach(), *torch.autograd.grad(loss, (x, table))

    plain = losses.cross_entropy(x @ table.T, labels, loss_mask, 0.1)
    expected = plain.detach(), *torch.autograd.grad(plain, (x, table))
    for chunk in (1, 64, 1000):
        monkeypatch.setattr(linear_cross_entropy, "CACHED_ROWS", chunk)
        for actual, reference in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(actual, reference)


HELD_MEMORY = """
import torch
from regard.devices import held_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

size = 200 * 2**20
with held_memory(torch.device("cpu")):
    block = torch.ones(size // 4)
    full = resident()
    del block
    assert resident() > full - size // 2, "released at once"
assert resident() < full - size // 2, "never released"
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_kept_for_reuse_and_released_at_the_end() -> None:
    """Compare the resident memory that the system reports before and after 200 MB are freed.

    In a process of its own: a thread that was given another arena by earlier tests keeps it, whose blocks of this size
    glibc maps one by one.
    """
    subprocess.run([sys.executable, "-c", HELD_MEMORY], check=True)


def test_other_devices_are_unaffected() -> None:
    with held_memory(torch.device("meta")):
        assert torch.ones(3).sum() == 3
