"""Calls our operations on CPU tensors, and compiles each kernel for a GPU instead of starting it.

This runs in a separate process, since the other tests interpret kernels. The compiler rejects code that the
interpreter accepts, such as a variable that changes its shape in a loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
CAPABILITY = 80  # of an A100; later GPUs run the same code
SHARED = 163 * 1024 // 2  # bytes: half of a multiprocessor's shared memory, so that two programs fit
OPTIONS = ("num_warps", "num_stages")
compiled_counts: dict[str, int] = {}


def compiled(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + NAMES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    binary = compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", CAPABILITY, 32), options)
    assert binary.asm["cubin"]
    assert binary.metadata.shared <= SHARED, (kernel.fn.__name__, binary.metadata.shared)
    compiled_counts[kernel.fn.__name__] = compiled_counts.get(kernel.fn.__name__, 0) + 1


def main() -> None:
    from regard.kernels.add_norm import add_norm, add_norm_backward
    from regard.kernels.cross_entropy import cross_entropy_with_grad
    from regard.kernels.decode_attention import decode_attention
    from regard.kernels.probe import _probe_kernel
    from regard.kernels.topk import logsumexp, topk
    from regard.kernels.varlen_attention import varlen_attention, varlen_attention_backward

    JITFunction.run = compiled  # type: ignore[method-assign]
    _probe_kernel[(1,)](torch.zeros(1))
    of, begins = torch.zeros(100, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    for dtype, head_width, causal in (
        (torch.bfloat16, 64, True),
        (torch.bfloat16, 128, False),
        (torch.float32, 48, True),
    ):
        q, k, v = (torch.zeros(100, 2, n, dtype=dtype) for n in (head_width, head_width, 32))
        out, lse = varlen_attention(q, k, v, of, of, begins, begins, causal, 0.125)
        varlen_attention_backward(torch.zeros_like(v), q, k, v, out, lse, of, of, begins, begins, causal, 0.125)
        q, k, v = (torch.zeros(3, 2, n, d, dtype=dtype) for n, d in ((4, head_width), (50, head_width), (50, 32)))
        decode_attention(q, k, v, torch.zeros(3, 1, 4, 50, dtype=dtype), 0.125)
    for dtype, bias, with_grad in ((torch.bfloat16, None, True), (torch.float32, torch.zeros(40), False)):
        x, table, labels = torch.zeros(6, 8, dtype=dtype), torch.zeros(40, 8, dtype=dtype), torch.zeros(6).long()
        cross_entropy_with_grad(x, table, bias, labels, labels > 0, 0.1, with_grad)
    for dtype, centred in ((torch.bfloat16, True), (torch.float32, False)):
        x, seeds = torch.zeros(6, 512), torch.zeros(2, dtype=torch.int32) if centred else None
        bias = torch.zeros(512) if centred else None
        how = seeds, 0.2 if centred else 0.0
        kept = add_norm(x, x.to(dtype), bias, torch.zeros(512), bias, *how, 1e-5, centred, dtype)
        given = [centred, True, centred]
        add_norm_backward(x, x.to(dtype), x, *kept[2:], torch.zeros(512), *how, centred, given, dtype, 4, 1)
        logsumexp(torch.zeros(6, 37000, dtype=dtype))
        topk(torch.zeros(6, 37000, dtype=dtype), 5)
    for dtype in (torch.float32, torch.bfloat16):  # the widest rows of which several are loaded at once
        x, gain = torch.zeros(6, 1024, dtype=dtype), torch.zeros(1024)
        kept = add_norm(x, x, gain, gain, gain, None, 0.0, 1e-5, True, dtype)
        add_norm_backward(x, x, x, *kept[2:], gain, None, 0.0, True, [True] * 3, dtype, 4, 3)
    print(compiled_counts)


if __name__ == "__main__":
    main()
