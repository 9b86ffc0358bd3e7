"""Layouts: the pieces of a cut tensor, by themselves and against torch.chunk."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from koushi.layout import Cut, Replicate, Shard, chunk, local_shape, local_slices, replicated_over

DIMS = ("dp_replicate", "dp_shard", "tp")


@given(size=st.integers(0, 50), degree=st.integers(1, 12))
def test_chunks_partition_the_rows(size: int, degree: int) -> None:
    spans = [chunk(size, degree, index) for index in range(degree)]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(size))


@given(size=st.integers(1, 50), degree=st.integers(1, 12))
def test_chunks_are_those_of_torch(size: int, degree: int) -> None:
    spans = [chunk(size, degree, index) for index in range(degree)]
    held = [piece.tolist() for piece in torch.arange(size).chunk(degree)]
    held += [[]] * (degree - len(held))
    assert [list(range(start, stop)) for start, stop in spans] == held


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Cut, ...], dict[str, int]]:
    """A shape, cuts on distinct mesh dims in some order, and the degrees."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    placements = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    names = draw(st.permutations(DIMS))[: draw(st.integers(0, len(DIMS)))]
    degrees = {name: draw(st.integers(1, 4)) for name in DIMS}
    return shape, tuple(Cut(name, draw(placements)) for name in names), degrees


@given(cut_tensors())
def test_nested_cuts_hold_every_element_once_for_each_copy(
    case: tuple[tuple[int, ...], tuple[Cut, ...], dict[str, int]],
) -> None:
    shape, cuts, degrees = case
    held = torch.zeros(shape, dtype=torch.int64)
    for indices in product(*(range(degrees[name]) for name in DIMS)):
        held[local_slices(shape, cuts, degrees, dict(zip(DIMS, indices, strict=True)))] += 1
    cutting = {cut.mesh_dim for cut in cuts if isinstance(cut.placement, Shard)}
    copies = 1
    for name in DIMS:
        copies *= 1 if name in cutting else degrees[name]
    assert (held == copies).all()


@given(cut_tensors())
def test_a_local_part_is_what_cutting_one_after_the_other_leaves(
    case: tuple[tuple[int, ...], tuple[Cut, ...], dict[str, int]],
) -> None:
    shape, cuts, degrees = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for indices in product(*(range(degrees[name]) for name in DIMS)):
        coordinate = dict(zip(DIMS, indices, strict=True))
        piece = whole
        for cut in cuts:
            if isinstance(cut.placement, Shard):
                pieces = piece.chunk(degrees[cut.mesh_dim], cut.placement.dim)
                empty = piece.narrow(cut.placement.dim, 0, 0)
                index = coordinate[cut.mesh_dim]
                piece = pieces[index] if index < len(pieces) else empty
        assert torch.equal(whole[local_slices(shape, cuts, degrees, coordinate)], piece)
        assert local_shape(shape, cuts, degrees, coordinate) == tuple(piece.shape)


def test_the_order_of_cuts_matters() -> None:
    """Ten rows by 2 and then 4 are 3, 2 (of 5); by 4 and then 2 they are 2, 1 (of 3)."""
    degrees = {"dp_shard": 4, "tp": 2}
    first, second = Cut("tp", Shard(0)), Cut("dp_shard", Shard(0))
    coordinate = {"dp_shard": 1, "tp": 1}
    assert local_slices((10,), (first, second), degrees, coordinate) == (slice(7, 9),)
    assert local_slices((10,), (second, first), degrees, coordinate) == (slice(5, 6),)


@pytest.mark.parametrize(("index", "span"), [(0, (0, 1)), (2, (2, 3)), (3, (3, 3)), (7, (3, 3))])
def test_pieces_beyond_the_rows_are_empty(index: int, span: tuple[int, int]) -> None:
    assert chunk(3, 8, index) == span


def test_which_dims_hold_copies() -> None:
    cuts = (Cut("tp", Replicate()), Cut("dp_shard", Shard(0)), Cut("dp_replicate", Replicate()))
    assert replicated_over(cuts) == ("tp", "dp_replicate")
    assert replicated_over(()) == ()
