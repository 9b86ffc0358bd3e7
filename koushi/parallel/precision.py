"""Dtypes by their names in a run file, and mixed precision.

Parameters stay in their own dtype; the model's leaf layers use them in that of the activations, so
mixed precision is one choice: what the embedding gives out. Data parallel gathers parameters in the
same dtype, which saves the cast and half the bytes.
"""

from __future__ import annotations

import torch

from koushi.config.schema import DtypeName
from koushi.models.llama.model import Llama

DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def apply(module: Llama, compute: torch.dtype) -> Llama:
    """Make ``module`` compute in ``compute``, in place."""
    module.set_compute_dtype(compute)
    return module
