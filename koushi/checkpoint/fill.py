"""Weights into the shards that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from koushi.checkpoint.weights import Weights
from koushi.parallel.shards import LocalParameter


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
