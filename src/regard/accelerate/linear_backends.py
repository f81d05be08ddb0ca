"""Linear layers for decoding on a CPU: W x + b as `F.linear` computes it, but faster.

`F.linear` repacks the weights for its kernel at every call; with the few rows of a decoding step that costs as much as
the arithmetic. `PrepackedLinear` packs them once. `Int8Linear` multiplies 8-bit integers, which is faster still and a
little less exact. Both are called like `F.linear`, which is their definition.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import torch_private
from regard.errors import UserError
from regard.models import SequenceModel
from regard.models.base import LinearFn


class _PreparedWeights:
    """A cache of what is computed from each weight; computed again after the weight has changed."""

    def __init__(self) -> None:
        self._cache: dict[
            int, tuple[Tensor, int | None, Any]
        ] = {}  # by the id of the weight, which is valid as long as the weight is referenced

    def _prepared(self, weight: Tensor) -> Any:
        entry = self._cache.get(id(weight))
        if entry is None or entry[1] is None or entry[1] != torch_private.version(weight):
            entry = self._cache[id(weight)] = (weight, torch_private.version(weight), self._prepare(weight.detach()))
        return entry[2]

    def _prepare(self, weight: Tensor) -> Any:
        raise NotImplementedError  # implemented by each backend


class PrepackedLinear(_PreparedWeights):
    """`F.linear` with weights packed once into oneDNN's layout.

    Falls back to `F.linear` with gradients, in other precisions and on other devices.
    """

    @staticmethod
    def is_available() -> bool:
        return torch_private.can_prepack()

    def _prepare(self, weight: Tensor) -> Tensor:
        return torch_private.prepack(weight)

    def packed(self, weight: Tensor) -> Tensor:
        """A weight in oneDNN's layout."""
        packed: Tensor = self._prepared(weight)
        return packed

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() or not x.is_cpu or x.dtype != torch.float32 or not x.numel():
            return F.linear(x, weight, bias)
        return torch_private.prepacked_linear(x, self._prepared(weight), bias)


class Int8Linear(_PreparedWeights):
    """W x + b in 8-bit integers: y = s_x s_W (W_8 x_8) + b, where W ≈ s_W W_8 and x ≈ s_x x_8.

    Scales are per row of W and per row of x (its largest magnitude over 127), so that a token does not depend on other
    tokens of its batch. Processors with VNNI instructions accumulate in 32 bits, and x has 8 bits. Others add two
    products in 16 bits, which limits them to 2 · 127 · 127, so x has 7 bits.
    """

    def __init__(self, vnni: bool | None = None) -> None:
        super().__init__()
        self.vnni = torch_private.has_vnni() if vnni is None else vnni
        self.max_activation = 127 if self.vnni else 63  # the zero point is one more
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise UserError("int8 needs kernels that this PyTorch, or this processor, does not have: use fp32")

    def _prepare(self, weight: Tensor) -> Any:
        scale = weight.abs().amax(1).clamp(min=1e-30) / 127
        if self.vnni:
            whole = (weight / scale[:, None]).round().to(torch.int8)
            packed = torch.ops.onednn.qlinear_prepack(whole, None)
            return partial(_linear_vnni, packed, scale, torch.zeros(len(scale), dtype=torch.int32))
        return partial(_linear_fbgemm, _prepack_fbgemm(weight, scale))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        size = x.abs().amax(-1, keepdim=True).clamp_(min=1e-30)
        y = self._prepared(weight)(x / size, self.max_activation)
        return y.mul_(size) if bias is None else torch.addcmul(bias.detach(), y, size, out=y)


def _linear_vnni(packed: Tensor, scale: Tensor, zero: Tensor, x: Tensor, levels: int) -> Tensor:
    """W x for x in [-1, 1], on processors with VNNI."""
    signed = (x * levels).round_().to(torch.int8)
    whole = signed.view(torch.uint8).bitwise_xor_(128)  # adds the zero point; PyTorch's conversion to unsigned is slow
    multiply = torch.ops.onednn.qlinear_pointwise
    return multiply(whole, 1 / levels, levels + 1, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], "")


def _linear_fbgemm(packed: Any, x: Tensor, levels: int) -> Tensor:
    """W x for x in [-1, 1], on other processors."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1 / levels, levels + 1, packed)


def _prepack_fbgemm(weight: Tensor, scale: Tensor) -> Any:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # selects its weight layout
    try:
        with warnings.catch_warnings():  # about the deprecation of quantized tensors, which these kernels need
            warnings.simplefilter("ignore")
            zero = torch.zeros(len(scale), dtype=torch.long)
            whole = torch.quantize_per_channel(weight.float(), scale.double(), zero, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(whole, None)
    finally:
        torch.backends.quantized.engine = before


def prepare(model: SequenceModel, precision: str = "fp32") -> None:
    """Let a model on a CPU use `PrepackedLinear` or `Int8Linear`. Parameters and their names stay."""
    if next(model.parameters()).device.type != "cpu":
        return
    if precision == "fp32" and not PrepackedLinear.is_available():
        return
    # After a block of this size was freed, glibc keeps such blocks instead of returning them to the system, from which
    # every step would request them again, page by page.
    torch.empty(31 << 20, dtype=torch.uint8)
    linear: LinearFn = PrepackedLinear() if precision == "fp32" else Int8Linear()
    model.linear = linear
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_call_linear, linear, module)  # type: ignore[method-assign]


def _call_linear(linear: LinearFn, layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
