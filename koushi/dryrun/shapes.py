"""Operators on meta tensors, asked for their output's shape once and from then on given it.

A meta tensor is nothing but sizes, strides and a dtype, and so follows from those of the arguments. torch
computes them in Python for every elementwise operator anew, which is most of a dry run's time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from koushi.parallel.calls import Operator, tensors_in

Made = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor that has a storage of its own, no larger than it needs."""

Outputs = tuple[Made | int | None, ...]
"""Of an operator: tensors, numbers, and tensors that aren't there. A bare tensor is a tuple of one."""

NAMESPACES = ("aten", "koushi", "koushi_dryrun")
"""Others' operators may do more than their schema says: carry something, or give back what they got."""

_META = torch.device("meta")


class _Unknown(Exception):
    """An argument that an output may depend on otherwise than by its shape."""


@dataclass(slots=True)
class _Known:
    """What is known of one operator."""

    operator: Operator
    makes: bool
    """Whether all that it gives is new."""
    alone: bool
    """Whether it gives a bare tensor."""
    outputs: dict[Hashable, Outputs]
    """By its arguments."""


@final
class KnownShapes:
    """Runs operators; those that make nothing but new meta tensors of meta tensors once for each kind of arguments."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        """By the identity of the operator: its hash is computed in Python."""

    def __call__(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        known = self._known.get(id(operator))
        if known is None:
            alone = len(operator._schema.returns) == 1
            known = self._known[id(operator)] = _Known(operator, makes_new(operator), alone, {})
        if not known.makes:
            return operator(*args, **kwargs)
        key: list[Hashable] = []
        try:
            _describe(args, key)
            for name, value in kwargs.items():
                key.append(name)
                _describe((value,), key)
        except _Unknown:
            return operator(*args, **kwargs)
        described = tuple(key)
        outputs = known.outputs.get(described)
        if outputs is not None:
            made = tuple(map(_make, outputs))
            return made[0] if known.alone else made
        out = operator(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        found = _outputs((out,) if known.alone else out, given)
        if found is None:
            known.makes = False  # torch says so of some views
        else:
            known.outputs[described] = found
        return out


def makes_new(operator: Operator) -> bool:
    """Whether the operator's schema says that it makes tensors out of others, and writes to none."""
    schema = operator._schema
    returns = [str(each.type) for each in schema.returns]
    return (
        schema.name.split("::")[0] in NAMESPACES
        and "Tensor" in returns
        and {"Tensor", "int", "SymInt"}.issuperset(returns)
        and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
        and any(str(each.type) in ("Tensor", "List[Tensor]") for each in schema.arguments)
    )


def _make(output: Made | int | None) -> Tensor | int | None:
    if isinstance(output, tuple):
        return torch.empty_strided(output[0], output[1], dtype=output[2], device=_META)
    return output


def _describe(values: tuple[Any, ...] | list[Any], key: list[Hashable]) -> None:
    """Add to ``key`` all that an output's shape can follow from. Raises _Unknown."""
    for value in values:
        if isinstance(value, Tensor):
            kind = type(value)
            if (kind is not Tensor and kind is not torch.nn.Parameter) or not value.is_meta:
                raise _Unknown
            key += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            _describe(value, key)
        else:
            key.append((type(value), value))


def _outputs(out: Sequence[Tensor | int | None], given: Sequence[Tensor]) -> Outputs | None:
    """None where what is given out next time might not be the same."""
    taken = {each.untyped_storage()._cdata for each in given}
    found: list[Made | int | None] = []
    for one in out:
        made = _as_made(one, taken) if isinstance(one, Tensor) else one
        if isinstance(one, Tensor):
            if made is None:
                return None
            taken.add(one.untyped_storage()._cdata)
        found.append(made)
    return tuple(found)


def _as_made(out: Tensor, taken: Set[int]) -> Made | None:
    """None where a new tensor of the same sizes and strides would not be the same, as of views that don't say so."""
    if not out.is_meta or type(out) is not Tensor or out.storage_offset() != 0:
        return None
    storage = out.untyped_storage()
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=_META).untyped_storage()
    if storage.nbytes() != like.nbytes() or storage._cdata in taken:
        return None
    return out.shape, out.stride(), out.dtype
