"""Ranks on nodes: which sub-meshes stay inside a node, and which reach across. No torch.

Nodes are filled in the order of ranks, as torchrun does it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from koushi.hardware.hardware import load
from koushi.job import Job
from koushi.mesh import MeshSpec


@dataclass(frozen=True)
class Nodes:
    """The nodes that a mesh needs, ``size`` devices each; the last may be filled in part."""

    mesh: MeshSpec
    size: int

    @property
    def count(self) -> int:
        return -(-self.mesh.world_size // self.size)

    def ranks(self, node: int) -> range:
        return range(node * self.size, min((node + 1) * self.size, self.mesh.world_size))

    def reach(self, *names: str) -> Counter[int]:
        """Groups of a mesh dim or fold, by how many nodes each has ranks on.

        >>> Nodes(MeshSpec.of(dp_shard=4, tp=3), 8).reach("tp")
        Counter({1: 3, 2: 1})
        """
        nodes = 1
        offsets = [0]
        firsts = Counter({0: 1})  # first ranks of groups, counted by their place in a node
        for name, stride, degree in zip(self.mesh.names, self.mesh.strides, self.mesh.shape, strict=True):
            if name not in names:
                moved: Counter[int] = Counter()
                for place, count in firsts.items():
                    for index in range(min(degree, self.size)):
                        # After `size` steps the places repeat.
                        repeats = len(range(index, degree, self.size))
                        moved[(place + index * stride) % self.size] += count * repeats
                firsts = moved
            elif stride % self.size == 0:
                # Each step lands on other nodes, and what lies further in stays within them.
                nodes *= degree
            else:
                offsets = [offset + index * stride for offset in offsets for index in range(degree)]
        reached: Counter[int] = Counter()
        for place, count in firsts.items():
            reached[nodes * len({(place + offset) // self.size for offset in offsets})] += count
        return reached

    def link(self, *names: str) -> str:
        """The links that the groups of a mesh dim or fold use, in words."""
        if self.mesh.degree(*names) == 1:
            return "none"
        reached = self.reach(*names)
        texts = {1: "inside a node"} | {nodes: f"across {nodes} nodes" for nodes in reached if nodes > 1}
        if len(reached) == 1:
            return texts[next(iter(reached))]
        return ", ".join(f"{reached[nodes]} {texts[nodes]}" for nodes in sorted(reached))


def devices_per_node(job: Job) -> int:
    """Of the job's hardware. Raises ConfigError where there is none of that name."""
    return load(job.hardware).devices_per_node
