"""Operators on meta tensors, asked for their output's shape once and from then on given it.

A meta tensor is nothing but sizes, strides and a dtype, and so follows from those of the arguments. torch
computes them in Python for every elementwise operator anew, which is most of a dry run's time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from koushi.parallel.calls import Operator, tensors_in

Made = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor that has a storage of its own, no larger than it needs."""

NAMESPACES = ("aten", "koushi_dryrun")
"""Others' operators may do more than their schema says: carry something, or give back what they got."""


class _Unknown(Exception):
    """An argument that an output may depend on otherwise than by its shape."""


@final
class KnownShapes:
    """Runs operators; those that make one new meta tensor out of meta tensors once for each kind of arguments."""

    def __init__(self) -> None:
        self._makes: dict[Operator, bool] = {}
        self._made: dict[Hashable, Made | None] = {}

    def __call__(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        makes = self._makes.get(operator)
        if makes is None:
            makes = self._makes[operator] = makes_one(operator)
        if not makes:
            return operator(*args, **kwargs)
        key: list[Hashable] = [operator]
        try:
            _describe(args, key)
            for name, value in kwargs.items():
                key.append(name)
                _describe((value,), key)
        except _Unknown:
            return operator(*args, **kwargs)
        described = tuple(key)
        made = self._made.get(described)
        if made is not None:
            return torch.empty_strided(made[0], made[1], dtype=made[2], device="meta")
        out = operator(*args, **kwargs)
        if described not in self._made:
            self._made[described] = _as_made(out, tensors_in((args, tuple(kwargs.values()))))
        return out


def makes_one(operator: Operator) -> bool:
    """Whether the operator's schema says that it makes one tensor out of others, and writes to none."""
    schema = operator._schema
    return (
        schema.name.split("::")[0] in NAMESPACES
        and [str(each.type) for each in schema.returns] == ["Tensor"]
        and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))
        and any(str(each.type) in ("Tensor", "List[Tensor]") for each in schema.arguments)
    )


def _describe(values: tuple[Any, ...] | list[Any], key: list[Hashable]) -> None:
    """Add to ``key`` all that an output's shape can follow from. Raises _Unknown."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):
                raise _Unknown
            key += (value.shape, value.stride(), value.dtype)
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            _describe(value, key)
        else:
            key.append((type(value), value))


def _as_made(out: Tensor, given: Sequence[Tensor]) -> Made | None:
    """None where a new tensor of the same sizes and strides would not be the same, as of views that don't say so."""
    if not out.is_meta or type(out) is not Tensor or out.storage_offset() != 0:
        return None
    storage = out.untyped_storage()
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta").untyped_storage()
    if storage.nbytes() != like.nbytes() or storage._cdata in {each.untyped_storage()._cdata for each in given}:
        return None
    return out.shape, out.stride(), out.dtype
