"""MeshSpec: the lattice of devices as pure arithmetic, without torch.

A mesh dim is a named axis of the lattice; its degree is how many devices lie along it. Ranks are
numbered row-major: the last dim changes fastest, so its groups are neighbouring ranks of one node.
A fold is several dims read as one axis, in mesh order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

MOST_DEVICES = 2**20
"""More than any lattice has."""

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

FOLDS: Mapping[str, tuple[str, ...]] = {
    "data": ("dp_replicate", "dp_shard"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "parameter_shard": ("dp_shard", "cp"),
}


@dataclass(frozen=True)
class MeshSpec:
    """Ordered, named degrees, outermost dim first.

    >>> spec = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=4, tp=8)
    >>> spec.world_size
    128
    >>> spec.coordinate(37)
    {'pp': 0, 'dp_replicate': 1, 'dp_shard': 0, 'cp': 0, 'tp': 5}
    >>> spec.group(37, "tp")
    (32, 33, 34, 35, 36, 37, 38, 39)
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shape):
            raise ValueError(f"{len(self.names)} names for {len(self.shape)} degrees")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"mesh dims are named twice: {', '.join(self.names)}")
        for name, degree in zip(self.names, self.shape, strict=True):
            if degree < 1:
                raise ValueError(f"the degree of {name} is {degree}; it must be at least 1")

    @classmethod
    def of(cls, **degrees: int) -> MeshSpec:
        """The mesh of all ``MESH_DIMS``; dims not named have degree 1 and still exist."""
        unknown = set(degrees) - set(MESH_DIMS)
        if unknown:
            raise ValueError(f"no such mesh dim: {', '.join(sorted(unknown))}; the dims are {', '.join(MESH_DIMS)}")
        return cls(MESH_DIMS, tuple(degrees.get(name, 1) for name in MESH_DIMS))

    @cached_property
    def world_size(self) -> int:
        return prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """How far apart in rank two neighbours along each dim are."""
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    @cached_property
    def _degrees(self) -> dict[tuple[str, ...], int]:
        """Those that have been asked for."""
        return {}

    def degree(self, *names: str) -> int:
        """How many devices lie along a dim, or along a fold of several."""
        found = self._degrees.get(names)
        if found is None:
            found = self._degrees[names] = prod(self.shape[self._axis(name)] for name in set(names))
        return found

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` sits: its index along every dim."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        return {
            name: rank // stride % degree
            for name, stride, degree in zip(self.names, self.strides, self.shape, strict=True)
        }

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; dims left out count as 0."""
        rank = 0
        for name, index in coordinate.items():
            axis = self._axis(name)
            if not 0 <= index < self.shape[axis]:
                raise ValueError(f"{name}={index} is outside its degree {self.shape[axis]}")
            rank += index * self.strides[axis]
        return rank

    def index(self, rank: int, *names: str) -> int:
        """The index of ``rank`` within its group of a dim or fold (row-major over the fold)."""
        coordinate = self.coordinate(rank)
        index = 0
        for name in self._in_order(names):
            index = index * self.degree(name) + coordinate[name]
        return index

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that share every coordinate with ``rank`` but those of ``names``."""
        coordinate = self.coordinate(rank)
        base = rank - sum(self.strides[self._axis(name)] * coordinate[name] for name in set(names))
        return tuple(base + offset for offset in self._offsets(names))

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Every group of a dim or fold, by their first rank."""
        others = [name for name in self.names if name not in names]
        offsets = self._offsets(names)
        return tuple(tuple(base + offset for offset in offsets) for base in self._offsets(others))

    def describe(self, rank: int) -> str:
        """A coordinate for people, degree-1 dims left out: ``pp=0 dp_shard=1 tp=1``."""
        parts = [f"{name}={index}" for name, index in self.coordinate(rank).items() if self.degree(name) > 1]
        return " ".join(parts) or "the only rank"

    def __str__(self) -> str:
        return "[" + ", ".join(f"{name}={degree}" for name, degree in zip(self.names, self.shape, strict=True)) + "]"

    def _axis(self, name: str) -> int:
        try:
            return self.names.index(name)
        except ValueError:
            raise ValueError(f"no mesh dim {name!r}; the dims are {', '.join(self.names)}") from None

    def _in_order(self, names: Iterable[str]) -> list[str]:
        return sorted(set(names), key=self._axis)

    def _offsets(self, names: Iterable[str]) -> list[int]:
        axes = sorted({self._axis(name) for name in names})
        return [
            sum(index * self.strides[axis] for index, axis in zip(indices, axes, strict=True))
            for indices in product(*(range(self.shape[axis]) for axis in axes))
        ]
