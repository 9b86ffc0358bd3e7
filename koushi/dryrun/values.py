"""What an operator does to what is known of its tensors: moves it, scales it, adds it up, or computes anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from koushi.parallel.calls import Operator

Place = tuple[int, int]
"""A storage, and an offset in it."""
NOWHERE = 0
"""As a set of mesh dims, which are bits: none."""


class Value(NamedTuple):
    """What is known of some elements, all of them alike. A tuple, since a step makes a hundred thousand."""

    number: int
    """The step of the computation that made it; 0: nobody saw it made."""
    content: int
    """Equal for what was computed alike from the same."""
    every: int = NOWHERE
    """Mesh dims along which each rank holds the same numbers. Along others they may be the same."""
    some: int = NOWHERE
    """Mesh dims along which the ranks share one of the terms that this is the sum of."""
    zero: bool = False
    gathered: frozenset[int] = frozenset()
    """Events whose gathered whole this is, moved at most."""
    reduced: frozenset[int] = frozenset()
    """Events whose sum this is, moved and scaled at most."""
    scale: float = 1.0
    """By what it was last scaled, as a number known beforehand."""
    origins: frozenset[Place] = frozenset()
    """Where it was moved from."""


class Kind(Enum):
    VIEW = auto()
    MOVE = auto()
    SCALE = auto()
    """By a number, or by a tensor without dims."""
    ADD = auto()
    """Sums, also of powers."""
    ZERO = auto()
    OTHER = auto()


_KINDS: Mapping[Kind, frozenset[str]] = {
    Kind.MOVE: frozenset(
        {"clone", "copy_", "copy", "_to_copy", "cat", "stack", "wait_tensor", "constant_pad_nd", "index_copy"}
        | {"split_with_sizes_copy", "all_gather_copy_in", "chunk_cat", "_chunk_cat", "_foreach_copy_", "contiguous"}
        | {"slice_scatter", "select_scatter", "slice_backward", "select_backward", "view_copy", "expand_copy"}
    ),
    Kind.SCALE: frozenset(
        {"mul", "mul_", "div", "div_", "neg", "neg_"}
        | {"_foreach_mul", "_foreach_mul_", "_foreach_div", "_foreach_div_", "_foreach_neg", "_foreach_neg_"}
    ),
    Kind.ADD: frozenset(
        {"add", "add_", "sub", "sub_", "_foreach_add", "_foreach_add_", "sum", "pow", "pow_", "square"}
        | {"norm", "linalg_vector_norm", "_foreach_norm", "_foreach_pow"}
    ),
    Kind.ZERO: frozenset({"zeros", "zeros_like", "new_zeros", "zero_"}),
}
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "all_gather_copy_in", "_foreach_copy_"})


@dataclass(frozen=True, slots=True)
class Effect:
    name: str
    names: tuple[str, ...]
    """Of its arguments."""
    kind: Kind
    writes: tuple[str, ...]
    """Arguments that it writes to."""
    overwritten: tuple[str, ...]
    """Those of which it doesn't matter what stood there."""
    one_by_one: bool
    """Whether it does the same to each tensor of a list."""
    joins: bool
    """Whether it puts tensors one after the other."""
    fills: bool
    """Whether it gives every element the same number."""
    divides: bool


_effects: dict[int, tuple[Operator, Effect]] = {}
"""By the identity of the operator: its hash is computed in Python."""


def effect(operator: Operator) -> Effect:
    known = _effects.get(id(operator))
    if known is None:
        known = _effects[id(operator)] = (operator, _effect(operator))
    return known[1]


def _effect(operator: Operator) -> Effect:
    schema = operator._schema
    name = schema.name.split("::")[1]
    written = tuple(each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write)
    if name == "all_gather_copy_in":
        written = ("all_gather_output",)  # which its schema does not say
    overwrites = name in _OVERWRITES or schema.overload_name.endswith("out") or "out" in written
    return Effect(
        name=schema.name,
        names=tuple(each.name for each in schema.arguments),
        kind=_kind(operator, name, bool(written)),
        writes=written,
        overwritten=written if overwrites else (),
        one_by_one=name.startswith("_foreach_"),
        joins=name in ("cat", "stack"),
        fills=name in ("fill_", "full", "full_like", "new_full", "scalar_tensor"),
        divides="div" in name,
    )


def _kind(operator: Operator, name: str, writes: bool) -> Kind:
    if not writes and any(each.alias_info is not None for each in operator._schema.returns):
        return Kind.VIEW
    return next((kind for kind, names in _KINDS.items() if name in names), Kind.OTHER)


def flat(value: Any) -> tuple[Any, ...]:
    """A nest of tuples without the nesting."""
    return tuple(each for part in value for each in flat(part)) if isinstance(value, tuple) else (value,)


def number_among(values: Iterable[Any]) -> float | None:
    """The first plain number among arguments."""
    return next((float(each) for each in values if isinstance(each, (int, float)) and not isinstance(each, bool)), None)


def plain(value: Any) -> Any:
    """Arguments as something that can be hashed, tensors left out."""
    if isinstance(value, (list, tuple)):
        return tuple(plain(each) for each in value)
    if isinstance(value, Mapping):
        return tuple((name, plain(each)) for name, each in value.items())
    if isinstance(value, Tensor):
        return None
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
