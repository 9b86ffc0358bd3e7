"""The comparison finds what it is there to find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from koushi.layout import Slices
from koushi.verify.compare import KINDS, TOLERANCES, Difference, Tolerance, assemble, compare, relative
from koushi.verify.record import Piece, RankRecord

TOLERANCE = Tolerance(scalars=1e-6, tensors=1e-4, order=math.inf)
WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64).view(4, 3)
TENSOR_KINDS = tuple(kind for kind in KINDS if kind not in ("loss", "gradient norm"))


def piece(part: Slices, kind: str = "parameter", name: str = "w") -> Piece:
    return Piece(kind, name, 2, (4, 3), part, WHOLE[part].clone())


def rank(*parts: Slices, losses: Sequence[float] = (2.0, 1.5), norms: Sequence[float] = (0.5, 0.4)) -> RankRecord:
    return RankRecord(list(losses), list(norms), [piece(part, kind) for part in parts for kind in TENSOR_KINDS])


def rows(start: int, stop: int) -> Slices:
    return (slice(start, stop), slice(0, 3))


ALONE = [rank(rows(0, 4))]


def layout() -> list[RankRecord]:
    """Two shards of uneven size, each held twice."""
    return [rank(rows(0, 3)), rank(rows(0, 3)), rank(rows(3, 4)), rank(rows(3, 4))]


def change(records: list[RankRecord], where: int, kind: str, how: Callable[[Tensor], Tensor]) -> None:
    records[where] = replace(
        records[where],
        pieces=[
            replace(one, values=how(one.values.clone())) if one.kind == kind else one for one in records[where].pieces
        ],
    )


def shifted(amount: float) -> Callable[[Tensor], Tensor]:
    def shift(values: Tensor) -> Tensor:
        values[0, 1] += amount
        return values

    return shift


def differing(records: list[RankRecord]) -> tuple[set[str], list[str]]:
    differences, wrong = compare(ALONE, records, TOLERANCE)
    assert [one.kind for one in differences] == list(KINDS), "every kind is compared, in order"
    return {one.kind for one in differences if not one.within}, wrong


def test_equal_layouts_are_equal() -> None:
    assert differing(layout()) == (set(), [])
    differences, _ = compare(ALONE, layout(), TOLERANCE)
    assert [one.relative for one in differences] == [0.0] * len(KINDS)
    assert {one.kind: one.tolerance for one in differences} == {
        "initial": 0.0,
        "loss": 1e-6,
        "gradient norm": 1e-6,
        "gradient": 1e-4,
        "parameter": 1e-4,
        "exp_avg": 1e-4,
        "exp_avg_sq": 1e-4,
    }


def test_pieces_make_a_whole() -> None:
    whole = assemble(layout())
    assert whole.wrong == []
    assert set(whole.tensors) == {(kind, "w", 2) for kind in TENSOR_KINDS}
    assert all(torch.equal(value, WHOLE) for value in whole.tensors.values())


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_a_wrong_value_is_found_where_it_is(kind: str) -> None:
    records = layout()
    for where in (2, 3):
        change(records, where, kind, shifted(0.1))
    assert differing(records) == ({kind}, [])
    for order, size in ((math.inf, 12.0), (2, WHOLE.norm().item())):
        differences, _ = compare(ALONE, records, replace(TOLERANCE, order=order))
        worst = {one.kind: one for one in differences}[kind]
        assert worst.where == "w at step 2"
        assert worst.relative == pytest.approx(0.1 / size)


def test_initial_values_have_no_tolerance() -> None:
    records = layout()
    for kind in ("initial", "gradient"):
        for where in (2, 3):
            change(records, where, kind, shifted(1e-9))
    assert differing(records) == ({"initial"}, [])


@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_a_replica_that_drifts_by_any_amount_is_found(kind: str) -> None:
    records = layout()
    change(records, 1, kind, shifted(1e-12))
    _, wrong = differing(records)
    assert wrong == [f"{kind} w 2: rank 1 holds other numbers than a rank before it"]


def test_overlapping_pieces_are_compared_where_they_overlap() -> None:
    records = [rank(rows(0, 3)), rank(rows(2, 4))]
    assert differing(records) == (set(), [])
    change(records, 1, "gradient", shifted(1e-12))
    assert differing(records)[1] == ["gradient w 2: rank 1 holds other numbers than a rank before it"]


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("kind", TENSOR_KINDS)
def test_a_value_that_is_not_finite_is_found(kind: str, value: float) -> None:
    records = layout()
    for where in (2, 3):
        change(records, where, kind, shifted(value))
    assert kind in differing(records)[0]


def test_a_gap_is_found() -> None:
    differ, wrong = differing([rank(rows(0, 2)), rank(rows(3, 4))])
    assert [f"{kind} w 2: 3 elements are held by no rank" for kind in TENSOR_KINDS] == wrong
    assert differ == set(TENSOR_KINDS), "what is not there is not finite"


def test_a_tensor_that_is_missing_or_too_many_is_found() -> None:
    records = [replace(one, pieces=[two for two in one.pieces if two.kind != "exp_avg"]) for one in layout()]
    _, wrong = compare(ALONE, records, TOLERANCE)
    assert wrong == ["tensors held by one layout only: [\"('exp_avg', 'w', 2)\"]"]
    records = layout()
    records[3].pieces.append(piece(rows(0, 4), name="stray"))
    _, wrong = compare(ALONE, records, TOLERANCE)
    assert wrong == ["tensors held by one layout only: [\"('parameter', 'stray', 2)\"]"]


@pytest.mark.parametrize("field", ("losses", "grad_norms"))
@pytest.mark.parametrize("value", (1.0, math.nan, math.inf))
def test_a_wrong_scalar_on_any_rank_is_found(field: str, value: float) -> None:
    records = layout()
    records[2] = replace(records[2], **{field: [getattr(records[2], field)[0], value]})
    kind = {"losses": "loss", "grad_norms": "gradient norm"}[field]
    assert differing(records) == ({kind}, [])
    worst = {one.kind: one for one in compare(ALONE, records, TOLERANCE)[0]}[kind]
    assert worst.where == "step 1 on rank 2"


def test_too_few_steps_are_our_own_fault() -> None:
    records = layout()
    records[0] = replace(records[0], losses=[2.0])
    with pytest.raises(ValueError, match="shorter"):
        compare(ALONE, records, TOLERANCE)


def test_relative_differences() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative(one, other) == pytest.approx(0.5 / 4)
    assert relative(one, other, 2) == pytest.approx(0.5 / 5)
    zero = torch.zeros(2)
    assert relative(zero, zero) == 0.0
    assert relative(zero, one) == math.inf
    assert relative(torch.tensor([math.nan]), torch.tensor([math.nan])) == math.inf
    assert relative(torch.tensor([math.inf]), torch.tensor([math.inf])) == math.inf


def test_a_difference_that_is_no_number_is_not_within() -> None:
    assert Difference("loss", 1e-6, "", 1e-6).within
    assert not Difference("loss", math.nan, "", 1e-6).within
    assert not Difference("loss", math.inf, "", 1e-6).within


def test_float64_allows_less() -> None:
    wide, narrow = TOLERANCES["float32"], TOLERANCES["float64"]
    assert (wide.scalars, wide.tensors, narrow.scalars, narrow.tensors) == (1e-5, 1e-4, 1e-12, 1e-9)
    assert narrow.order == math.inf, "not one element may differ"
