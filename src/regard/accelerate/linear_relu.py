"""relu(W x + b) in training as one matmul: cuBLASLt applies the bias and the ReLU before it writes the result.

torch.compile and eager PyTorch run the ReLU as a kernel of its own, which reads and writes the widest activation of a
block once more. T tokens, D features, F hidden features.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
from torch import Tensor

from regard import torch_private

ROWS = 64  # tokens of a partial sum


@torch.library.custom_op("regard::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [T, D], weight [F, D], bias [F] -> relu(x W^T + b) [T, F]."""
    return torch_private.addmm_relu(bias, x, weight.t())


@linear_relu.register_fake
def _(x, weight, bias):
    return x.new_empty(len(x), len(weight))


def _save_for_backward(ctx, inputs, output):
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _backward(ctx, grad):
    x, weight, out = ctx.saved_tensors
    grad = torch.ops.aten.threshold_backward(grad, out, 0)  # 0 where the output is 0
    return grad @ weight, grad.t() @ x, column_sums(grad)


def column_sums(x: Tensor) -> Tensor:
    """Sum x [T, F] over T -> [F], in float32: first over groups of rows, which occupies more of a GPU than one pass."""
    partial = x.unflatten(0, (-1, ROWS)) if len(x) % ROWS == 0 else x[None]
    return partial.sum(1, dtype=torch.float32).sum(0).to(x.dtype)


linear_relu.register_autograd(_backward, setup_context=_save_for_backward)
