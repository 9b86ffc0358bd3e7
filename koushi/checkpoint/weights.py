"""Weights of an unsharded model, wherever they lie: read by name, whole or a slice at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, final

import torch
from pydantic import ValidationError
from torch import Tensor

from koushi.checkpoint.manifest import PARAMETER, TensorEntry
from koushi.checkpoint.tensors import CheckpointFiles
from koushi.config.schema import JobConfig
from koushi.errors import CheckpointError
from koushi.layout import Slices
from koushi.models.llama.layout import parameters
from koushi.models.llama.model import Llama
from koushi.models.llama.sizes import LlamaSize, llama_size
from koushi.parallel.shards import LocalParameter


class Weights(ABC):
    """Every parameter of a model under its canonical name, a tied output under the embedding's."""

    size: LlamaSize

    @abstractmethod
    def read(self, name: str, part: Slices) -> Tensor:
        """``part`` of parameter ``name``, on the CPU in the dtype it is stored in, in Koushi's order of rows.

        The tensor may share memory with the file, and is not to be written to. Raises WeightsError.
        """

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in the order of the model, one at a time."""
        for name, parameter in parameters(self.size).items():
            yield name, self.read(name, tuple(slice(0, extent) for extent in parameter.shape))


@final
class CheckpointWeights(Weights):
    """The parameters of a checkpoint. Raises CheckpointError for a folder that holds none that can be read."""

    def __init__(self, folder: Path):
        self.files = CheckpointFiles(folder)
        try:
            self.config = JobConfig.model_validate(dict(self.files.manifest.head.config))
            self.size = llama_size(self.config.model)
        except (ValidationError, KeyError) as error:
            raise CheckpointError(f"{folder}: its run file is not one that this version reads: {error}") from error
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


@torch.no_grad()
def fill_from(weights: Weights, held: Sequence[LocalParameter]) -> None:
    """Set every local shard to its slice, reading no more than that."""
    for parameter in held:
        value = parameter.value
        found = weights.read(parameter.description.name, parameter.part)
        assert found.shape == value.shape, (
            f"{parameter.name}: the layout gives {tuple(found.shape)}, torch holds {tuple(value.shape)}"
        )
        value.copy_(found)


@torch.no_grad()
def whole_model(weights: Weights, seq_len: int, device: torch.device, dtype: torch.dtype) -> Llama:
    """The model on one device, with these weights."""
    with torch.device("meta"):
        model = Llama(weights.size, seq_len).to(dtype)
    model.set_compute_dtype(dtype)
    model.to_empty(device=device)
    model.tie()
    for name, value in weights.whole():
        model.get_parameter(name).copy_(value)
    return model
