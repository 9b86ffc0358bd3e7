"""Batches of a run, cut so that a rank makes only the part its data-parallel coordinate owns.

B is the local batch, T the sequence length; tokens and labels are int64 [B, T].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from koushi.data.prepare import prepare
from koushi.data.samples import IGNORE_INDEX, Packed, Sample, Samples, Synthetic
from koushi.errors import DataError
from koushi.job import Job

Batch = tuple[torch.Tensor, torch.Tensor]


def open_samples(job: Job) -> Samples:
    """The samples of ``job``; its data is prepared first if no process has done so.

    Raises DataError for data that can't be used, or none to validate on where validation is on.
    """
    config = job.config
    data = config.data
    samples: Samples
    if data.source == "synthetic":
        samples = Synthetic(
            vocab_size=job.size.vocab_size,
            seq_len=config.training.seq_len,
            seed=config.training.seed,
            validation_fraction=data.validation_fraction,
            masked_fraction=data.masked_fraction,
        )
    else:
        corpus = prepare(job)
        samples = Packed(
            corpus.tokens,
            seq_len=config.training.seq_len,
            seed=config.training.seed,
            validation_fraction=data.validation_fraction,
            end_of_document_id=corpus.end_of_document_id,
            predict_across_documents=data.predict_across_documents,
            content=corpus.digest,
        )
    if config.validation.every and not samples.validation_count:
        raise DataError(
            f"validation.every: {config.validation.every}, but no sample is held out of {samples.train_count}; set "
            "validation.every to 0, data.validation_fraction above 0, or give data for at least 2 samples"
        )
    return samples


def train_batch(samples: Samples, first: int, local_batch: int, data_index: int) -> Batch:
    """One rank's part of a step: tokens and labels [B, T].

    ``first`` is the number of samples consumed before the step, ``data_index`` the rank's index along
    the data fold (dp_replicate × dp_shard).
    """
    start = first + data_index * local_batch
    return _stack([samples.train(i) for i in range(start, start + local_batch)])


def validation_batches(
    samples: Samples, global_batch: int, local_batch: int, data_index: int, batches: int
) -> Iterator[Batch]:
    """One rank's part of the first held-out batches: as many, of the same shape, on every rank.

    At most ``batches``. What the last lacks to a whole global batch is filled with samples that
    count in no loss, so that no rank waits for another.
    """
    whole = -(-samples.validation_count // global_batch)
    for batch in range(min(batches, whole)):
        start = batch * global_batch + data_index * local_batch
        held_out = [samples.validation(i) for i in range(start, min(start + local_batch, samples.validation_count))]
        yield _stack(held_out + [_masked(samples.seq_len)] * (local_batch - len(held_out)))


def _masked(seq_len: int) -> Sample:
    return np.zeros(seq_len, dtype=np.int64), np.full(seq_len, IGNORE_INDEX, dtype=np.int64)


def _stack(samples: Sequence[Sample]) -> Batch:
    tokens, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels))
