"""Recompute: activations made again in backward instead of kept.

full keeps only a block's input (arXiv 1604.06174). selective keeps the outputs of matmuls, of
attention and of reduce-scatters, and makes the cheap rest again (arXiv 2205.05198); gathered
activations are large and gathered again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from koushi.parallel.collectives import REDUCE_SCATTER

KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        REDUCE_SCATTER,
    }
)


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply(block: nn.Module, mode: Literal["none", "selective", "full"]) -> nn.Module:
    """Make ``block`` recompute its forward during backward, in place; names stay as they are."""
    if mode == "none":
        return block
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    block.forward = partial(checkpoint, block.forward, **options)
    return block
