"""Weights of an unsharded model, wherever they lie: read by name, whole or a slice at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from koushi.layout import Slices
from koushi.models.llama.layout import parameters
from koushi.models.llama.model import Llama
from koushi.models.llama.sizes import LlamaSize


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
