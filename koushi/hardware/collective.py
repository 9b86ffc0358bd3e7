"""Seconds of a collective by who takes part and how much travels. No torch.

A group is seen as domains x ranks per domain. Ring algorithms pass everything around once: bandwidth is
that of the narrowest link, latency that of every hop. Where each two devices have a link of their own, there are
rings enough to use all links that a group has.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from koushi.hardware.hardware import Hardware
from koushi.mesh import MeshSpec
from koushi.traffic import Operation

SMALL_SHARE = 0.4
"""What of a link's bandwidth NCCL's protocol for small messages gets: by its tuning.cc 88 GB/s on A100, 141 on H100."""
SWITCH_SHARE = 0.85
"""What of a link's bandwidth sums in switches get, by the same file."""


class Span(NamedTuple):
    """How a group lies on the cluster."""

    domains: int
    ranks: int
    """Of each domain."""

    @property
    def degree(self) -> int:
        return self.domains * self.ranks


@lru_cache(maxsize=65536)
def span(mesh: MeshSpec, dims: str, domain: int) -> Span:
    """Of the groups of a mesh dim, or of a fold (dims joined by a comma), with ranks in domains of so many (0: any)."""
    domain = domain or mesh.world_size
    inside = degree = 1
    for name in dims.split(","):
        axis = mesh.names.index(name)
        stride, along = mesh.strides[axis], mesh.shape[axis]
        degree *= along
        inside *= max(1, min(along, domain // stride))
    return Span(ceil(degree / inside), min(inside, degree))


def collective_seconds(hardware: Hardware, operation: Operation, size: float, group: Span) -> float:
    """Of one call that moves ``size`` bytes in the sense of ``Collective.bytes``; 0 in a group of one.

    Rings: Patarasuk and Yuan 2009 (doi:10.1016/j.jpdc.2008.09.002). All-reduce: by switches inside a domain
    that can add, and in a tree between domains (arXiv 2004.11731 has both costs).
    """
    if group.degree == 1:
        return 0.0
    inside, network = hardware.inside, hardware.network
    if operation in ("send", "recv"):
        link = inside if group.domains == 1 else network
        return (link.call_us + link.hop_us) * 1e-6 + size / (link.bandwidth * link.share(2))
    degree = group.degree
    bandwidth = inside.bandwidth * inside.share(group.ranks) if group.ranks > 1 else network.bandwidth
    latency = inside.call_us + inside.hop_us * (degree - 1)
    if group.domains > 1:
        # Every step of a ring waits for its slowest hop.
        latency = network.call_us + network.hop_us * (degree - 1)
        bandwidth = min(bandwidth, network.bandwidth * group.ranks)
    if operation != "all_reduce":
        return _started(hardware, latency * 1e-6, size * (degree - 1) / degree / bandwidth, group)
    passes = ring_passes(degree)
    if group.domains == 1 and inside.reduces:
        passes = min(passes, switch_passes(degree))
    if group.domains > 1:
        latency = inside.call_us + network.call_us + 2 * network.hop_us * log2(group.domains)
        latency += 2 * inside.hop_us * (group.ranks - 1)
        # A ring passes to its neighbours; the ways of a tree cross, those of all ranks that a domain has in the group.
        share = group.ranks / max(inside.devices, group.ranks)
        bandwidth /= 1 + network.crowding * (group.domains - 1) * share
    return _started(hardware, latency * 1e-6, size * passes / bandwidth, group)


def ring_passes(degree: int) -> float:
    """How often an all-reduce's bytes cross a link of a ring."""
    return 2.0 * (degree - 1) / degree


def switch_passes(degree: int) -> float:
    """The same where switches add, as if at a ring's bandwidth."""
    return (degree + 1) / degree / SWITCH_SHARE


def _started(hardware: Hardware, latency: float, moving: float, group: Span) -> float:
    """The faster of two protocols: one that starts at once and moves less, and one for large messages.

    Held to nccl-tests by tests/hardware/test_nccl_tables.py.
    """
    start = hardware.inside.large_start if group.domains == 1 else hardware.network.large_start
    return min(latency + moving / SMALL_SHARE, latency * start + moving)
