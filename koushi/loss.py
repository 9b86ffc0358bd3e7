"""The loss: the sum of token losses over the number of valid tokens in the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from koushi.data.samples import IGNORE_INDEX


def at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of logits [B, T, V] against labels [B, T], ignored ones left out."""
    flat = at_least_float32(logits.flatten(0, 1))
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels count, as an int64 scalar tensor."""
    return (labels != IGNORE_INDEX).sum()
