"""A checkpoint as weights, its optimizer state left alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self, final

from pydantic import ValidationError
from torch import Tensor

from koushi.checkpoint.manifest import PARAMETER, TensorEntry
from koushi.checkpoint.newest import candidates, newest
from koushi.checkpoint.tensors import CheckpointFiles
from koushi.checkpoint.weights import Weights
from koushi.config.schema import JobConfig
from koushi.errors import CheckpointError, WrongCheckpoint
from koushi.layout import Slices
from koushi.models.llama.layout import parameters
from koushi.models.llama.sizes import llama_size


@final
class CheckpointWeights(Weights):
    """The parameters of a checkpoint. Raises CheckpointError for a folder that holds none that can be read."""

    def __init__(self, path: Path):
        """``path`` is a checkpoint, or a run folder, whose newest whole one is taken."""
        folder, manifest = newest(candidates(path))
        self.files = CheckpointFiles(folder, manifest)
        try:
            self.config = JobConfig.model_validate(dict(self.files.manifest.head.config))
            self.size = llama_size(self.config.model)
        except (ValidationError, KeyError) as error:
            raise WrongCheckpoint(f"{folder}: its run file is not one that this version reads: {error}") from error
        held = self.files.manifest.by_key
        absent = [name for name, one in parameters(self.size).items() if not self._fits(held, name, one.shape)]
        if absent:
            raise CheckpointError(f"{folder}: its run file describes a model with other parameters: {absent[0]}")

    @staticmethod
    def _fits(held: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...]) -> bool:
        key = f"{PARAMETER}/{name}"
        return key in held and held[key].shape == shape

    def read(self, name: str, part: Slices) -> Tensor:
        return self.files.read(f"{PARAMETER}/{name}", part)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()
