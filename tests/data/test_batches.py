"""Batches: the same samples in the same order for every data-parallel degree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from koushi.data.batches import open_samples, train_batch, validation_batches
from koushi.data.samples import IGNORE_INDEX, Samples, Synthetic
from koushi.errors import DataError
from koushi.job import Job

MakeJob = Callable[..., Job]

DEGREES = (1, 2, 3, 4, 6, 12)
GLOBAL = 12


@pytest.fixture
def samples() -> Synthetic:
    return Synthetic(vocab_size=1000, seq_len=5, seed=4, masked_fraction=0.3)


def step(samples: Samples, first: int, degree: int) -> torch.Tensor:
    """Tokens and labels of all ranks, in rank order: [GLOBAL, 2, T]."""
    local = GLOBAL // degree
    parts = [torch.stack(train_batch(samples, first, local, index), 1) for index in range(degree)]
    assert all(part.shape == (local, 2, 5) and part.dtype == torch.int64 for part in parts)
    return torch.cat(parts)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_degree_changes_nothing(samples: Synthetic, degree: int) -> None:
    for first in (0, GLOBAL, 7 * GLOBAL + 5):
        assert torch.equal(step(samples, first, degree), step(samples, first, 1))


def test_resumes_anywhere_under_another_degree(samples: Synthetic) -> None:
    run = torch.cat([step(samples, number * GLOBAL, 1) for number in range(6)])
    resumed = [step(samples, number * GLOBAL, degree) for number, degree in zip(range(6), DEGREES, strict=True)]
    assert torch.equal(torch.cat(resumed), run)
    assert torch.equal(step(samples, 17, 4), run[17 : 17 + GLOBAL])


def test_a_batch_crosses_epochs(tmp_path: Path, make_job: MakeJob) -> None:
    np.arange(1, 12, dtype="<u2").tofile(tmp_path / "a.bin")
    samples = open_samples(make_job(seq_len=1, source="tokens", path="a.bin", validation_fraction=0.0))
    assert samples.train_count == 10
    tokens, _ = train_batch(samples, 0, 30, 0)
    for epoch in range(3):
        assert sorted(tokens[epoch * 10 : epoch * 10 + 10, 0].tolist()) == list(range(1, 11))


def held_out(count: int, **options: Any) -> Synthetic:
    samples = Synthetic(vocab_size=1000, seq_len=5, **options)
    samples.validation_count = count
    return samples


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("count", [1, 11, 12, 13, 25, 30])
def test_validation_is_alike_on_every_rank(degree: int, count: int) -> None:
    samples = held_out(count)
    local = GLOBAL // degree
    ranks = [list(validation_batches(samples, GLOBAL, local, index, batches=2)) for index in range(degree)]
    assert {len(batches) for batches in ranks} == {min(2, -(-count // GLOBAL))}
    assert all(part.shape == (local, 5) for batches in ranks for batch in batches for part in batch)
    whole = [torch.cat(parts) for batch in zip(*ranks, strict=True) for parts in zip(*batch, strict=True)]
    tokens, labels = torch.cat(whole[::2]), torch.cat(whole[1::2])
    for i in range(len(tokens)):
        if i < count:
            expected = samples.validation(i)
            assert tokens[i].tolist() == expected[0].tolist()
            assert labels[i].tolist() == expected[1].tolist()
        else:
            assert set(labels[i].tolist()) == {IGNORE_INDEX}
            assert set(tokens[i].tolist()) == {0}


def test_nothing_held_out_is_no_batch() -> None:
    assert list(validation_batches(held_out(0), GLOBAL, 3, 0, batches=4)) == []


@pytest.mark.usefixtures("embedded_cache")
def test_open_embedded(make_job: MakeJob) -> None:
    job = make_job(seq_len=256)
    samples = open_samples(job)
    assert samples.train_count * 256 > 150_000
    assert 0.04 < samples.validation_count / samples.train_count < 0.06
    tokens, labels = train_batch(samples, 0, 64, 0)
    assert tokens.shape == labels.shape == (64, 256)
    assert tokens.min() >= 0
    assert tokens.max() < job.size.vocab_size
    masked = labels == IGNORE_INDEX
    assert torch.equal(masked, tokens == 1)
    assert len(set((~masked).sum(1).tolist())) > 1, "documents end unequally often in samples"
    inside = ~masked[:, :-1]
    assert torch.equal(labels[:, :-1][inside], tokens[:, 1:][inside])


def test_open_passes_the_options_on(tmp_path: Path, make_job: MakeJob) -> None:
    np.array([1, 2, 9, 4, 5, 9, 6, 7, 8], "<u2").tofile(tmp_path / "a.bin")
    options: dict[str, Any] = {"source": "tokens", "path": "a.bin", "validation_fraction": 0.0}
    valid = []
    for more in ({"end_of_document_id": 9}, {"end_of_document_id": 9, "predict_across_documents": True}, {}):
        _, labels = train_batch(open_samples(make_job(seq_len=8, **options, **more)), 0, 1, 0)
        valid.append(int((labels != IGNORE_INDEX).sum()))
    assert valid == [6, 8, 8]


def test_open_synthetic(make_job: MakeJob, cache: Path) -> None:
    job = make_job(source="synthetic", masked_fraction=1.0, sections={"model": {"vocab_size": 64}})
    tokens, labels = train_batch(open_samples(job), 0, 4, 0)
    assert tokens.max() < 64
    assert set(labels.flatten().tolist()) == {IGNORE_INDEX}
    assert not cache.exists()
    seeds = [{"training": {"seed": seed, "seq_len": 8}} for seed in (0, 1)]
    one, other = (open_samples(make_job(source="synthetic", sections=section)) for section in seeds)
    assert not torch.equal(train_batch(one, 0, 4, 0)[0], train_batch(other, 0, 4, 0)[0])


def test_validation_without_samples_is_refused(tmp_path: Path, make_job: MakeJob) -> None:
    np.arange(1, 12, dtype="<u2").tofile(tmp_path / "a.bin")
    sections = {"validation": {"every": 5}}
    with pytest.raises(DataError, match=r"validation\.every: 5, but no sample is held out of 1;"):
        open_samples(make_job(seq_len=10, source="tokens", path="a.bin", sections=sections))
    assert open_samples(make_job(seq_len=5, source="tokens", path="a.bin", sections=sections)).validation_count == 1
