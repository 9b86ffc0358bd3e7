"""Initial weights: the same numbers whatever part of a tensor is drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from koushi.layout import Slices
from koushi.optim import initial
from koushi.optim.initial import draw


def everything(shape: tuple[int, ...]) -> Slices:
    return tuple(slice(0, size) for size in shape)


@st.composite
def shapes_and_parts(draw_from: st.DrawFn) -> tuple[tuple[int, ...], Slices]:
    shape = tuple(draw_from(st.lists(st.integers(1, 40), min_size=1, max_size=2)))
    bounds = [sorted(draw_from(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, tuple(slice(start, stop) for start, stop in bounds)


@given(case=shapes_and_parts(), block=st.sampled_from((1, 24, 100, 1 << 16)), ones=st.booleans())
def test_a_part_is_that_part_of_the_whole(case: tuple[tuple[int, ...], Slices], block: int, ones: bool) -> None:
    shape, part = case
    std = None if ones else 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "BLOCK_NUMEL", block)
        whole = draw(3, "w", shape, std, everything(shape))
        piece = draw(3, "w", shape, std, part)
    assert whole.shape == shape
    assert piece.dtype == whole.dtype == torch.float32
    assert piece.shape == whole[part].shape
    assert torch.equal(piece, whole[part])


def test_blocks_as_they_are() -> None:
    """Rows 100 to 800 of 1000 lie in the blocks 0 to 3 of 256 rows each."""
    whole = draw(0, "w", (1000, 256), 1.0, everything((1000, 256)))
    assert torch.equal(draw(0, "w", (1000, 256), 1.0, (slice(100, 800), slice(3, 200))), whole[100:800, 3:200])
    assert not torch.equal(whole[:256], whole[256:512])


def test_seed_and_name_decide() -> None:
    def numbers(seed: int, name: str) -> torch.Tensor:
        return draw(seed, name, (40, 5), 1.0, everything((40, 5)))

    first = numbers(0, "a")
    assert torch.equal(first, numbers(0, "a"))
    others = [numbers(1, "a"), numbers(0, "b"), numbers(2**40, "a"), numbers(0, "a/0")]
    assert all((first != other).all() for other in others)


def test_the_generator_of_everything_else_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draw(0, "a", (4, 4), 1.0, everything((4, 4)))
    assert torch.equal(torch.rand(3), expected)


def test_numbers_are_normal() -> None:
    values = draw(11, "w", (700, 500), 0.02, everything((700, 500))).double()
    count = values.numel()
    assert abs(values.mean().item()) < 5 * 0.02 / count**0.5
    assert values.std().item() == pytest.approx(0.02, rel=5 / (2 * count) ** 0.5)
    for within, share in ((1, 0.682689), (2, 0.954500), (3, 0.997300)):
        found = (values.abs() < within * 0.02).double().mean().item()
        assert abs(found - share) < 5 * (share * (1 - share) / count) ** 0.5


def test_norms_begin_as_ones() -> None:
    assert torch.equal(draw(0, "norm", (6,), None, (slice(2, 5),)), torch.ones(3))
    assert draw(0, "norm", (6,), None, (slice(6, 6),)).shape == (0,)
