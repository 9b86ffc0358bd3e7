"""How a tensor is cut over mesh dims: placements to local shapes and slices, in pure arithmetic.

A layout is a sequence of cuts in the order they are made: tensor parallel cuts the global tensor
first, fully sharded data parallel cuts what is left. Cuts follow ``torch.chunk``: every piece but
the last ones holds ceil(size / degree) rows, and a piece may be empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Each rank of the mesh dim holds one piece along tensor dim ``dim``."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Each rank of the mesh dim holds the whole tensor."""


Placement = Shard | Replicate


@dataclass(frozen=True)
class Cut:
    """What one mesh dim does to a tensor."""

    mesh_dim: str
    placement: Placement


Slices = tuple[slice, ...]


def chunk(size: int, degree: int, index: int) -> tuple[int, int]:
    """Start and stop of piece ``index`` when ``size`` rows are cut into ``degree`` pieces."""
    rows = -(-size // degree)
    return min(index * rows, size), min((index + 1) * rows, size)


def local_slices(
    shape: Sequence[int], cuts: Sequence[Cut], degrees: Mapping[str, int], coordinate: Mapping[str, int]
) -> Slices:
    """The part of a global tensor of ``shape`` that the rank at ``coordinate`` holds."""
    spans = [(0, size) for size in shape]
    for cut in cuts:
        if isinstance(cut.placement, Shard):
            start, stop = spans[cut.placement.dim]
            first, last = chunk(stop - start, degrees[cut.mesh_dim], coordinate[cut.mesh_dim])
            spans[cut.placement.dim] = (start + first, start + last)
    return tuple(slice(start, stop) for start, stop in spans)


def local_shape(
    shape: Sequence[int], cuts: Sequence[Cut], degrees: Mapping[str, int], coordinate: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of what the rank at ``coordinate`` holds."""
    return tuple(part.stop - part.start for part in local_slices(shape, cuts, degrees, coordinate))


def replicated_over(cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The mesh dims among ``cuts`` that hold copies rather than pieces."""
    return tuple(cut.mesh_dim for cut in cuts if isinstance(cut.placement, Replicate))


def divide_layers(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Layers of every stage, first to last, as even as possible.

    The embedding and the output head each weigh one layer, so the first and the last stage hold
    fewer. A remainder goes to the earliest middle stages, then to the first stage. With at least
    as many layers as stages every middle stage has a layer and none has fewer than zero.

    >>> divide_layers(6, 4)
    (1, 2, 2, 1)
    >>> divide_layers(7, 1)
    (7,)
    """
    if n_stages < 1 or n_layers < max(1, n_stages - 2):
        raise ValueError(f"{n_layers} layers cannot be divided over {n_stages} stages")
    if n_stages == 1:
        return (n_layers,)
    base, extra = divmod(n_layers + 2, n_stages)
    loads = [base] * n_stages
    for stage in (*range(1, n_stages - 1), 0)[:extra]:
        loads[stage] += 1
    loads[0] -= 1
    loads[-1] -= 1
    return tuple(loads)
