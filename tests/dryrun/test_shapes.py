"""What is given a shape that is known has the one that torch gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from koushi.dryrun import world  # noqa: F401  that defines operators
from koushi.dryrun.shapes import KnownShapes, makes_new
from koushi.parallel.calls import tensors_in
from koushi.parallel.collectives import REDUCE_SCATTER

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layout(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(), storage


CALLS: dict[str, Callable[[], tuple[object, tuple[object, ...]]]] = {
    "broadcast": lambda: (aten.mul.Tensor, (meta(4, 1, 3), meta(5, 3))),
    "promoted": lambda: (aten.add.Tensor, (meta(4, dtype=torch.int64), meta(4, dtype=torch.bfloat16))),
    "by an int": lambda: (aten.mul.Tensor, (meta(4, dtype=torch.int64), 2)),
    "by a float": lambda: (aten.mul.Tensor, (meta(4, dtype=torch.int64), 2.0)),
    "by a bool": lambda: (aten.mul.Tensor, (meta(4, dtype=torch.bool), True)),
    "transposed": lambda: (aten.silu.default, (meta(4, 6).t(),)),
    "a slice": lambda: (aten.neg.default, (meta(4, 6)[:, ::2],)),
    "a list": lambda: (aten.stack.default, ([meta(4, 6), meta(4, 6)], -1)),
    "a longer list": lambda: (aten.stack.default, ([meta(4, 6), meta(4, 6), meta(4, 6)], -1)),
    "another dim": lambda: (aten.stack.default, ([meta(4, 6), meta(4, 6)], 0)),
    "a product": lambda: (aten.mm.default, (meta(4, 6), meta(3, 6).t())),
    "expanded": lambda: (aten.clone.default, (meta(4, 1).expand(4, 5),)),
    "empty": lambda: (aten.mul.Tensor, (meta(0, 3), meta(3))),
}


def test_known_shapes_are_torchs() -> None:
    run = KnownShapes()
    for _ in range(2):
        for name, call in CALLS.items():
            operator, args = call()
            assert makes_new(operator), name
            assert layout(run(operator, args, {})) == layout(operator(*args)), name  # type: ignore[operator]


def attention(tokens: int) -> tuple[object, tuple[object, ...]]:
    q, k = (meta(2, heads, tokens, 8, dtype=torch.bfloat16) for heads in (4, 2))
    return aten._scaled_dot_product_flash_attention.default, (q, k, k, 0.0, True, False)


@pytest.mark.parametrize(
    ("operator", "args"),
    (
        attention(16),
        attention(24),
        (torch.ops.koushi_dryrun.rms_norm.default, (meta(3, 5), meta(5))),
        (REDUCE_SCATTER, (meta(4, 6), 0, 2, "any")),
    ),
)
def test_several_outputs_are_known_together(operator: Callable[..., Any], args: tuple[object, ...]) -> None:
    run = KnownShapes()
    assert makes_new(operator)
    expected, first, second = operator(*args), run(operator, args, {}), run(operator, args, {})
    for found in (first, second):
        assert described(found) == described(expected)
    storages = [one.untyped_storage()._cdata for one in (*tensors_in((first,)), *tensors_in((second,)))]
    assert len(storages) == 2 * len(tensors_in((expected,))) == len(set(storages))


def described(out: object) -> object:
    if isinstance(out, tuple):
        return tuple(map(described, out))
    return layout(out) if isinstance(out, Tensor) else out


def test_a_keyword_makes_a_difference() -> None:
    run = KnownShapes()
    for dtype in (torch.float64, torch.bfloat16, torch.float64):
        assert run(aten._to_copy.default, (meta(3),), {"dtype": dtype}).dtype == dtype


def test_the_second_call_does_not_reach_torch() -> None:
    run, calls = KnownShapes(), []

    class Counted:
        _schema = aten.neg.default._schema

        def __call__(self, *args: Tensor) -> Tensor:
            calls.append(args)
            out: Tensor = aten.neg.default(*args)
            return out

    operator = Counted()
    first, second = run(operator, (meta(3),), {}), run(operator, (meta(3),), {})
    assert len(calls) == 1
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    run(operator, (meta(4),), {})
    assert len(calls) == 2


def test_what_writes_views_or_carries_is_run() -> None:
    for operator in (
        aten.add_.Tensor,
        aten.view.default,
        aten.split.Tensor,
        aten.empty.memory_format,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.c10d.send.default,
    ):
        assert not makes_new(operator), operator


def test_a_view_that_does_not_say_so_is_run_each_time() -> None:
    run = KnownShapes()
    assert makes_new(aten._unsafe_view.default)
    for _ in range(3):
        x = meta(4, 6)
        out = run(aten._unsafe_view.default, (x, [2, 12]), {})
        assert out.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_real_tensors_are_computed() -> None:
    run = KnownShapes()
    for value in (1.0, 2.0):
        x = torch.full((3,), value)
        assert torch.equal(run(aten.neg.default, (x,), {}), -x)
    scale = torch.tensor(2.0)
    out = run(aten.mul.Tensor, (meta(3), scale), {})
    assert layout(out) == layout(meta(3))
