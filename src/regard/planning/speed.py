"""The time of a step: kernels by the roofline model, collectives as rings.

A matmul takes the longer of its arithmetic at the device's rate and its memory traffic at the device's bandwidth, other
kernels the latter, and none less than the time to start one. Attention takes the sum of both, since its tiles are too
small to hide one behind the other. `hardware.EFFICIENCY` holds the constants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from regard.planning.hardware import COLLECTIVES, EFFICIENCY, Hardware
from regard.planning.trace import Kernel, StepTrace, is_attention

BACKWARD_SHARE = 2 / 3  # share of the backward pass in the time of both


def kernel_seconds(kernel: Kernel, device: Hardware, compiled: bool = False) -> float:
    """The time of one kernel, with the gap before it."""
    moving, rate = kernel.bytes / device.bandwidth, EFFICIENCY.matmul * device.matmul_rate
    if is_attention(kernel.name):
        varlen = kernel.name.startswith("varlen")
        share = EFFICIENCY.varlen_attention if varlen else EFFICIENCY.flash_attention
        time = moving + kernel.flops / (share * device.matmul_rate)
    elif kernel.name == "cross_entropy_with_grad":
        time = kernel.flops / rate + moving
    elif kernel.flops:
        time = max(kernel.flops / rate + EFFICIENCY.matmul_traffic * moving, moving)
    elif kernel.name.startswith("add_norm"):
        time = moving / EFFICIENCY.norm
    else:
        time = moving / EFFICIENCY.pointwise * (EFFICIENCY.compiled if compiled else 1.0)
    return max(time, EFFICIENCY.kernel_seconds) + EFFICIENCY.kernel_seconds


def seconds(kernels: Iterable[Kernel], device: Hardware, compiled: bool = False) -> float:
    return sum(kernel_seconds(kernel, device, compiled) for kernel in kernels)


@dataclass(frozen=True)
class Cluster:
    """Equal devices in nodes of `per_node`."""

    device: Hardware
    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of a ring, per rank: between nodes, its devices share all network links of a node."""
        if self.nodes == 1:
            return self.device.link
        return min(self.device.link, self.device.network * min(self.per_node, self.ranks))

    def ring(self, size: float) -> float:
        """Seconds in which every rank passes on (n - 1) / n of `size` bytes, in n - 1 hops: a gather or a scatter.

        >>> from regard.planning.hardware import HARDWARE
        >>> Cluster(HARDWARE["h100"], 1, 8).ring(1e9)
        0.0
        """
        n, latency = self.ranks, COLLECTIVES.link_latency
        crossings = self.nodes if self.nodes > 1 else 0
        hops = (n - 1 - crossings) * latency + crossings * COLLECTIVES.network_latency if n > 1 else 0.0
        return max(hops, 0.0) + (n - 1) / n * size / self.bandwidth

    def all_reduce(self, size: float) -> float:
        """Seconds of a scatter and a gather; between nodes, the hops form a tree of nodes instead of a ring."""
        if self.nodes == 1:
            return 2 * self.ring(size)
        hops = 2 * (self.per_node - 1) * COLLECTIVES.link_latency
        hops += 2 * math.log2(self.nodes) * COLLECTIVES.network_latency
        return hops + 2 * (self.ranks - 1) / self.ranks * size / self.bandwidth


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of several ranks, of which `waiting` is communication that compute does not hide."""

    compute: float
    update: float
    communication: float  # all of it, hidden or not
    waiting: float
    sent: float  # bytes that each rank sends

    @property
    def total(self) -> float:
        return self.compute + self.update + self.waiting


@dataclass(frozen=True)
class Compute:
    """The work of one rank: seconds of one micro-batch and of the update, and the sizes that it communicates."""

    micro_batch: float
    update: float
    parameters: int
    units: int = 1  # parts that FSDP gathers separately

    @classmethod
    def of(cls, trace: StepTrace, device: Hardware) -> Compute:
        update = sum(kernel.bytes for kernel in trace.update) / device.bandwidth  # one kernel for many tensors
        units, passes = len({unit for _, unit in trace.shapes}), trace.micro_batches
        micro_batch = seconds(trace.step, device, trace.backend == "compiled") / passes
        return cls(micro_batch, update + EFFICIENCY.step_seconds, trace.parameters, units)


def ddp(work: Compute, cluster: Cluster, micro_batches: int = 1) -> StepTime:
    """Every rank has the whole model; gradients are summed during the last backward pass."""
    size = COLLECTIVES.grad_bytes * work.parameters
    communication = cluster.all_reduce(size) if cluster.ranks > 1 else 0.0
    behind = BACKWARD_SHARE * work.micro_batch  # what can hide it
    last = cluster.all_reduce(min(COLLECTIVES.bucket, size)) if cluster.ranks > 1 else 0.0
    exposed = max(communication - behind, last)
    sent = 2 * (cluster.ranks - 1) / cluster.ranks * size
    return _step(work, cluster, micro_batches, work.update, communication, behind, exposed, sent)


def fsdp(work: Compute, cluster: Cluster, micro_batches: int = 1) -> StepTime:
    """Weights are gathered block by block in every pass; gradients are summed and scattered once."""
    gathered, scattered = (size * work.parameters for size in (COLLECTIVES.weight_bytes, COLLECTIVES.grad_bytes))
    if cluster.ranks == 1:
        return _step(work, cluster, micro_batches, work.update, 0.0, 0.0, 0.0, 0.0)
    hops = (work.units - 1) * (cluster.ring(0.0))  # each unit pays the latency
    gather, scatter = cluster.ring(gathered) + hops, cluster.ring(scattered) + hops
    forward, backward = (1 - BACKWARD_SHARE) * work.micro_batch, BACKWARD_SHARE * work.micro_batch
    first, last = gather / work.units, scatter / work.units  # before the first block, and after the last
    exposed = micro_batches * (max(gather - forward, first) + max(gather - backward, 0.0))
    exposed += max(scatter - max(backward - gather, 0.0), last)
    communication = 2 * micro_batches * gather + scatter
    sent = (cluster.ranks - 1) / cluster.ranks * (2 * micro_batches * gathered + scattered)
    behind = micro_batches * work.micro_batch
    return _step(work, cluster, micro_batches, work.update / cluster.ranks, communication, behind, exposed, sent)


def _step(
    work: Compute,
    cluster: Cluster,
    micro_batches: int,
    update: float,
    communication: float,
    behind: float,
    exposed: float,
    sent: float,
) -> StepTime:
    compute = micro_batches * work.micro_batch
    waiting = exposed + COLLECTIVES.contention * min(communication, behind)
    waiting += COLLECTIVES.straggling * math.log2(cluster.nodes) * compute
    return StepTime(compute, update, communication, waiting, sent)
