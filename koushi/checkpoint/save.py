"""Saving while training goes on: a step waits only for the copy into host memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from koushi.checkpoint import dcp
from koushi.checkpoint.files import partial_of
from koushi.checkpoint.folders import clear_leftovers, keep, published, step_folder, step_of
from koushi.checkpoint.manifest import Head
from koushi.checkpoint.state import Piece
from koushi.config.schema import Checkpoint
from koushi.errors import CheckpointError


@final
class Saver:
    """Writes a run's checkpoints into ``folder``, one at a time, with every rank of ``group``.

    ``group`` is used for nothing else: a save in the background calls collectives while a step does. An error in the
    background comes out of the next call of ``raise_if_failed``, ``save`` or ``wait``, as a CheckpointError. Make it
    where no other save into ``folder`` goes on.
    """

    def __init__(self, folder: Path, options: Checkpoint, group: dist.ProcessGroup):
        self._folder = folder
        self._options = options
        self._group = group
        self._leads = dist.get_rank(group) == 0
        self._buffers: dict[str, Tensor] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="koushi-checkpoint")
        self._saving: Future[None] | None = None
        if self._leads:
            clear_leftovers(folder)

    def save(self, head: Head, pieces: Sequence[Piece], now: bool = False) -> None:
        """Save ``pieces`` as the checkpoint of ``head.step``; ``now``: return when it is published."""
        self.wait()
        wait = now or self._options.mode == "sync"
        self._saving = self._pool.submit(self._write, head, self._stage(pieces))
        if wait:
            self.wait()

    def raise_if_failed(self) -> None:
        """Raises CheckpointError if the save in the background has failed."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Return once nothing is being saved. Raises CheckpointError."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Begin no more saves. One in flight is waited for only if no other rank can hold it up."""
        self._pool.shutdown(wait=dist.get_world_size(self._group) == 1)

    @torch.no_grad()
    def _stage(self, pieces: Sequence[Piece]) -> list[Piece]:
        staged = []
        for piece in pieces:
            if piece.key not in self._buffers:
                self._buffers[piece.key] = torch.empty(
                    piece.part.sizes, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda
                )
            buffer = self._buffers[piece.key]
            buffer.copy_(piece.tensor, non_blocking=True)
            staged.append(replace(piece, tensor=buffer))
        if any(piece.tensor.is_cuda for piece in pieces):
            torch.cuda.current_stream().synchronize()
        return staged

    def _write(self, head: Head, pieces: Sequence[Piece]) -> None:
        folder = step_folder(self._folder, head.step)
        try:
            dcp.save(folder, head, pieces, self._group)
            if self._leads:
                keep(self._folder, head.step, self._options.keep_last, self._options.keep_every)
        except (OSError, CheckpointError) as error:
            if self._leads:
                shutil.rmtree(partial_of(folder), ignore_errors=True)
            raise CheckpointError(self._failure(head.step, error)) from None

    def _failure(self, step: int, error: Exception) -> str:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        before = [other for path in published(self._folder) if (other := step_of(path)) is not None and other != step]
        left = f"the checkpoint of step {before[0]} before it is untouched" if before else "there is none before it"
        return f"the checkpoint of step {step} could not be written{where}: {error}; {left}"
