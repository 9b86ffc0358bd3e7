"""The leaf layers that every model family is made of: the only modules that own parameters.

Parameters are stored in one dtype and used in that of the activations, which the embedding sets.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A projection without bias, in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class Embedding(nn.Embedding):
    """Token vectors in ``compute_dtype``, or in the dtype of the weight."""

    compute_dtype: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight).to(self.compute_dtype or self.weight.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
