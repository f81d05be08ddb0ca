"""The one table of constants about devices and links.

Rates are what programs reach, not what data sheets promise. Those of the H200 and of the kernels were measured
(docs/scale.md); the others are the data sheet's figures times the share that the H200 reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """A device, and how it is connected to others. Bytes, seconds and FLOPs."""

    name: str
    memory: float  # bytes that a process can use
    matmul_rate: float  # FLOP/s of one large matmul in bf16 (a CPU: fp32)
    bandwidth: float  # bytes/s of a kernel that only reads and writes memory
    link: float  # bytes/s of a collective inside a node, per device (NCCL's bus bandwidth)
    network: float  # bytes/s between nodes, per device
    workspace: float = 64 * 2**20  # bytes for cuBLAS and the CUDA graph


# Shares of the data sheet that are reached: the H200's 747 of 989 TFLOP/s and 4.2 of 4.8 TB/s, NCCL's 370 of 450 GB/s.
HARDWARE = {
    "h200": Hardware("NVIDIA H200", 139.8 * 2**30, 747e12, 4.2e12, 370 * GB, 46 * GB),
    "h100": Hardware("NVIDIA H100 SXM, 80 GB", 79.1 * 2**30, 680e12, 2.9e12, 370 * GB, 46 * GB),
    "a100": Hardware("NVIDIA A100 SXM, 80 GB", 79.1 * 2**30, 250e12, 1.75e12, 235 * GB, 23 * GB),
    "v100": Hardware("NVIDIA V100 SXM, 16 GB", 15.7 * 2**30, 95e12, 0.78e12, 120 * GB, 5.5 * GB),
    "l4": Hardware("NVIDIA L4, 24 GB", 22.0 * 2**30, 70e12, 0.26e12, 12 * GB, 3 * GB),
    "cpu": Hardware("CPU", 16 * 2**30, 1e11, 2e10, 5 * GB, 1 * GB, workspace=0),
}


@dataclass(frozen=True)
class Efficiency:
    """The shares of the rates of the device that kernels reach; measured on an H200 (docs/scale.md)."""

    matmul: float = 0.92  # share of the rate of one large matmul
    matmul_traffic: float = 0.12  # share of a matmul's memory traffic that its arithmetic does not hide
    varlen_attention: float = 0.25  # share of the matmul rate reached by our kernel for packed sentences
    flash_attention: float = 0.42  # the same: PyTorch's kernel for windows of equal length
    tile: int = 64  # keys that our kernel computes in vain for each query, on average
    norm: float = 0.65  # share of the bandwidth reached by our kernel of residual sum, dropout and norm
    pointwise: float = 0.7  # the same: all other kernels
    compiled: float = 0.5  # time of the other kernels after the compiler has fused them, over that before
    kernel_seconds: float = 2e-6  # shortest time of a kernel, and the gap between two
    step_seconds: float = 1e-3  # time of a step beside its kernels: copying the batch to the device
    usable_memory: float = 0.94  # share of the memory that a step may take: the rest is fragmentation and the driver


@dataclass(frozen=True)
class Collectives:
    """The model of communication: a ring, whose time is hops · latency + bytes / bandwidth."""

    link_latency: float = 3e-6  # seconds per hop inside a node
    network_latency: float = 8e-6  # seconds per hop between nodes
    bucket: float = 25e6  # bytes that DDP reduces at once: the last bucket is not hidden by the backward pass
    contention: float = 0.03  # share of compute time lost where communication runs beside it
    straggling: float = 0.012  # share of the step lost to waiting, for each doubling of the nodes
    grad_bytes: int = 4  # bytes of a reduced gradient: fp32
    weight_bytes: int = 2  # bytes of a weight that FSDP gathers: bf16


EFFICIENCY = Efficiency()
COLLECTIVES = Collectives()
