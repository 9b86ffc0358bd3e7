"""Samples: packing, boundaries, what is held out, and the order of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koushi.data.samples import IGNORE_INDEX, Packed, Samples, Synthetic
from koushi.data.tokens import TokenFiles
from koushi.errors import DataError

END = 9
STREAM = [1, 2, 3, END, 4, END, 5, 6, 7, 8, END, END, 1]
"""Documents of 3, 1, 4 and 0 tokens, each with its end, and the start of another."""


def packed(folder: Path, stream: list[int], **options: object) -> Packed:
    np.array(stream, "<u2").tofile(folder / "stream.bin")
    return Packed(TokenFiles([folder / "stream.bin"], "uint16"), **options)  # type: ignore[arg-type]


def lists(samples: Samples, count: int) -> list[tuple[list[int], list[int]]]:
    return [tuple(part.tolist() for part in samples.sample(j)) for j in range(count)]


def test_boundaries(tmp_path: Path) -> None:
    no = IGNORE_INDEX
    samples = packed(tmp_path, STREAM, seq_len=4, end_of_document_id=END)
    assert samples.train_count == 3
    assert lists(samples, 3) == [
        ([1, 2, 3, END], [2, 3, END, no]),
        ([4, END, 5, 6], [END, no, 6, 7]),
        ([7, 8, END, END], [8, END, no, no]),
    ]


def test_across_documents(tmp_path: Path) -> None:
    shifted = [
        ([1, 2, 3, END], [2, 3, END, 4]),
        ([4, END, 5, 6], [END, 5, 6, 7]),
        ([7, 8, END, END], [8, END, END, 1]),
    ]
    options = {"seq_len": 4, "end_of_document_id": END, "predict_across_documents": True}
    assert lists(packed(tmp_path, STREAM, **options), 3) == shifted
    assert lists(packed(tmp_path, STREAM, seq_len=4), 3) == shifted


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 10))
def test_packing_against_its_definition(
    tmp_path_factory: pytest.TempPathFactory, stream: list[int], seq_len: int
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    if len(stream) <= seq_len:
        with pytest.raises(DataError, match="fewer than one sample"):
            packed(folder, stream, seq_len=seq_len)
        return
    samples = packed(folder, stream, seq_len=seq_len, end_of_document_id=0)
    assert samples.train_count == (len(stream) - 1) // seq_len
    for j in range(samples.train_count):
        tokens, labels = samples.sample(j)
        assert tokens.dtype == labels.dtype == np.int64
        for position in range(seq_len):
            place = j * seq_len + position
            assert tokens[position] == stream[place]
            assert labels[position] == (IGNORE_INDEX if stream[place] == 0 else stream[place + 1])


def test_exactly_one_sample_is_enough(tmp_path: Path) -> None:
    samples = packed(tmp_path, [1, 2, 3], seq_len=2, validation_fraction=0.5)
    assert (samples.train_count, samples.validation_count) == (1, 0)
    with pytest.raises(DataError, match="seq_len of at most 2"):
        packed(tmp_path, [1, 2, 3], seq_len=3)


def counting(folder: Path, count: int, **options: object) -> Packed:
    """Sample j starts with token j."""
    return packed(folder, [*range(count), 0], seq_len=1, **options)


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"),
    [(100, 0.0, 0), (100, 0.05, 5), (100, 0.001, 1), (2, 0.9, 1), (2, 0.01, 1), (1, 0.5, 0), (10, 0.99, 9)],
)
def test_how_many_are_held_out(tmp_path: Path, count: int, fraction: float, held_out: int) -> None:
    samples = counting(tmp_path, count, validation_fraction=fraction)
    assert (samples.train_count, samples.validation_count) == (count - held_out, held_out)


def test_held_out_samples_are_never_trained_on(tmp_path: Path) -> None:
    samples = counting(tmp_path, 40, validation_fraction=0.2, seed=3)
    held_out = [int(samples.validation(i)[0][0]) for i in range(samples.validation_count)]
    assert held_out == list(range(32, 40))
    trained = {int(samples.train(i)[0][0]) for i in range(5 * samples.train_count)}
    assert trained == set(range(32))
    with pytest.raises(AssertionError, match="held-out sample 8 of 8"):
        samples.validation(8)


def order(samples: Samples, start: int, stop: int) -> list[int]:
    return [int(samples.train(i)[0][0]) for i in range(start, stop)]


def test_every_epoch_is_a_new_permutation(tmp_path: Path) -> None:
    samples = counting(tmp_path, 50)
    epochs = [order(samples, epoch * 50, epoch * 50 + 50) for epoch in range(10)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 10


def test_order_follows_the_seed_alone(tmp_path: Path) -> None:
    one, same, other = (counting(tmp_path, 50, seed=seed) for seed in (1, 1, 2))
    assert order(one, 0, 120) == order(same, 0, 120)
    assert order(one, 0, 120) != order(other, 0, 120)
    # From anywhere, in any direction.
    assert [order(one, i, i + 1)[0] for i in reversed(range(120))] == order(one, 0, 120)[::-1]
    assert order(one, 0, 5) == [17, 10, 3, 0, 13]


def test_synthetic_is_a_function_of_seed_and_index() -> None:
    one, same, other = (Synthetic(vocab_size=500, seq_len=16, seed=seed, masked_fraction=0.4) for seed in (1, 1, 2))
    for i in (0, 1, 10**7):
        assert all(np.array_equal(*parts) for parts in zip(one.train(i), same.train(i), strict=True))
        assert not np.array_equal(one.train(i)[0], other.train(i)[0])
    tokens, labels = one.sample(0)
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.tolist()[:4] == [52, 0, 107, 224]


def test_synthetic_ids_and_labels() -> None:
    samples = Synthetic(vocab_size=7, seq_len=64, validation_fraction=0.1)
    for j in range(20):
        tokens, labels = samples.sample(j)
        assert len(tokens) == len(labels) == 64
        assert tokens.min() >= 0
        assert tokens.max() < 7
        assert np.array_equal(labels[:-1], tokens[1:])
    assert samples.validation_count == round(0.1 * (1 << 20))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.6, 0.75, 1.0])
def test_synthetic_masks_unequally_but_the_share_asked_for(fraction: float) -> None:
    samples = Synthetic(vocab_size=50, seq_len=100, masked_fraction=fraction)
    shares = np.array([(samples.sample(j)[1] == IGNORE_INDEX).mean() for j in range(2000)])
    assert abs(shares.mean() - fraction) < 0.03
    if 0 < fraction < 1:
        assert len(set(shares.tolist())) > 15
    if fraction > 0.5:
        assert abs((shares == 1).mean() - (2 * fraction - 1)) < 0.04
