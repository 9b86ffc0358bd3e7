"""The lattice drawn with characters: a box for every node, a cell for every rank. No torch.

A node's place is a device's number in its node. What is alike is drawn once: of many nodes, or of many
devices in one, only those where a mesh dim takes its first step, ends or begins again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import final

from koushi.job import Job
from koushi.mesh import FOLDS, MeshSpec
from koushi.report.nodes import Nodes
from koushi.report.words import FLOWS, FOLD_USES, columns, ranks_text
from koushi.units import counted

MOST_NODES = 16
"""Up to so many are all drawn."""
WIDEST = 72
"""Characters of the cells of one node."""


def mesh_text(job: Job, node_size: int = 8) -> str:
    """Nodes with their ranks, the groups of every sub-mesh, and what flows on them."""
    nodes = Nodes(job.mesh, node_size)
    lines = [_headline(job, nodes), "", *Picture(nodes).lines(), "", *groups(nodes)]
    flows = columns((name, FLOWS[name]) for name in job.mesh.names if job.mesh.degree(name) > 1)
    if flows:
        lines += ["", "what flows", *flows]
    reach = nodes.reach("tp")
    if max(reach) > 1 and node_size > 1:
        lines += ["", f"note: tp runs in every layer, and here it is {nodes.link('tp')}; inside a node it is faster"]
    return "\n".join(lines)


def _headline(job: Job, nodes: Nodes) -> str:
    world, size = job.mesh.world_size, nodes.size
    used = f", {world} of them used" if world < size else ""
    if nodes.count > 1 and world % size:
        used = f", {world % size} of them used on the last"
    of = "of 1 device" if size == 1 else f"of {size} devices"
    return f"{job.name}: {counted(world, 'rank')} {job.mesh} on {counted(nodes.count, 'node')} {of}{used}"


def groups(nodes: Nodes) -> list[str]:
    """A line for every mesh dim and every fold: its groups, the link they use, the first and the last group."""
    mesh = nodes.mesh
    rows = [(name, _counted(mesh, name), nodes.link(name), _examples(mesh, name)) for name in mesh.names]
    lines = columns([("sub-mesh", "groups", "link", "ranks"), *rows], indent="")
    folds = [("fold", "of", "groups", "link", "use")]
    for fold, dims in FOLDS.items():
        folds.append((fold, " × ".join(dims), _counted(mesh, *dims), nodes.link(*dims), FOLD_USES[fold]))
    return [*lines, "", *columns(folds, indent="")]


def _counted(mesh: MeshSpec, *dims: str) -> str:
    degree = mesh.degree(*dims)
    return "degree 1" if degree == 1 else f"{mesh.world_size // degree} of {degree}"


def _examples(mesh: MeshSpec, dim: str) -> str:
    if mesh.degree(dim) == 1:
        return "each rank alone" if mesh.world_size > 1 else "the only rank"
    texts = [f"[{ranks_text(mesh.group(rank, dim), most=5)}]" for rank in _first_and_last(mesh, dim)]
    return (" … " if mesh.world_size > 2 * mesh.degree(dim) else " ").join(texts)


def _first_and_last(mesh: MeshSpec, dim: str) -> list[int]:
    """The lowest ranks of the first and the last group; one where there is one group."""
    last = mesh.coordinate(mesh.world_size - 1)
    return sorted({0, mesh.rank(last | {dim: 0})})


@final
class Picture:
    """The boxes."""

    def __init__(self, nodes: Nodes):
        self.nodes = nodes
        self.mesh = nodes.mesh
        self.cell = len(str(self.mesh.world_size - 1))
        held = len(nodes.ranks(0))
        self.places = list(range(held))
        """The devices of a node that are drawn."""
        if held * (self.cell + 1) > WIDEST:
            self.places = landmarks(held, [stride for stride in self.mesh.strides if stride < held])
        self.rows = list(range(nodes.count))
        """The nodes that are drawn."""
        if nodes.count > MOST_NODES:
            self.rows = landmarks(nodes.count, [stride // nodes.size for stride in self.mesh.strides])
        self.alike = [name for name in self.mesh.names if self._is_alike(name)]
        """The dims along which the places of every node have the same coordinates."""
        self.block = min((self.mesh.degree(name) * self._stride(name) for name in self.alike), default=held)
        """Places of one group of the innermost of these."""

    def lines(self) -> list[str]:
        return [*self._header(), self._rule("┌", "┬", "┐"), *self._nodes(), self._rule("└", "┴", "┘")]

    def _stride(self, name: str) -> int:
        return self.mesh.strides[self.mesh.names.index(name)]

    def _is_alike(self, name: str) -> bool:
        stride, degree = self._stride(name), self.mesh.degree(name)
        inside = degree > 1 and stride < len(self.nodes.ranks(0))
        return inside and (self.nodes.count == 1 or self.nodes.size % (stride * degree) == 0)

    @property
    def _margin(self) -> int:
        return max([len(f"node {self.nodes.count - 1}"), *(len(name) for name in self.alike)])

    def _header(self) -> list[str]:
        lines = []
        for name in self.alike:
            indices = [str(place // self._stride(name) % self.mesh.degree(name)) for place in self.places]
            lines.append(f"{name:>{self._margin}}  {self._cells(indices, ' ', ' ')}".rstrip())
        return lines

    def _nodes(self) -> list[str]:
        lines: list[str] = []
        for above, node in pairwise([-1, *self.rows]):
            if node > above + 1:
                more = f"{'⋮':>{self._margin}}  {counted(node - above - 1, 'more node')}"
                lines += [self._rule("└", "┴", "┘"), more, self._rule("┌", "┬", "┐")]
            elif node > 0:
                lines.append(self._rule("├", "┼", "┤"))
            ranks = self.nodes.ranks(node)
            texts = [str(ranks[place]) if place < len(ranks) else "" for place in self.places]
            label = f"node {node}"
            lines.append(f"{label:<{self._margin}} │{self._cells(texts, '│', '…')} │  {self._where(ranks)}".rstrip())
        return lines

    def _cells(self, texts: list[str], between: str, gap: str) -> str:
        """One text per place shown, ``between`` groups of the innermost dim, ``gap`` where places are left out."""
        pieces = []
        for above, place, text in zip([-1, *self.places], self.places, texts, strict=False):
            if place > above + 1:
                pieces.append(f" {gap}" if text else "  ")
            if above >= 0 and place // self.block > above // self.block:
                pieces.append(f" {between}")
            pieces.append(f" {text:>{self.cell}}")
        return "".join(pieces)

    def _rule(self, left: str, cross: str, right: str) -> str:
        """A horizontal line whose crossings stand where ``_cells`` puts the separators."""
        drawn = self._cells(["0"] * len(self.places), "│", "…") + " "
        return " " * (self._margin + 1) + left + "".join(cross if one == "│" else "─" for one in drawn) + right

    def _where(self, ranks: range) -> str:
        """The coordinates of a node's ranks along the dims that the header does not give."""
        parts = []
        for name in self.mesh.names:
            if self.mesh.degree(name) == 1 or name in self.alike:
                continue
            parts.append(f"{name}={_indices(self.mesh.coordinate(rank)[name] for rank in ranks)}")
        return " ".join(parts)


def _indices(indices: Iterable[int]) -> str:
    """``2``, ``0-3``, or ``3,0`` where a node begins in one group and ends in the next."""
    seen = list(dict.fromkeys(indices))
    if len(seen) > 2 or seen == sorted(seen):
        low, high = min(seen), max(seen)
        return f"{low}-{high}" if high > low else f"{low}"
    return ",".join(map(str, seen))


def landmarks(count: int, strides: Iterable[int]) -> list[int]:
    """Which of ``count`` things in a row to draw: the first two, the last, and those around each stride."""
    around = {one for stride in strides for one in (stride - 1, stride)}
    shown = {one for one in {0, 1, count - 1} | around if 0 <= one < count}
    return sorted(shown | {one for one in range(count) if {one - 1, one + 1} <= shown})
