"""Recompute: activations made again in backward instead of kept.

full keeps only a block's input (arXiv 1604.06174). selective keeps the outputs of matmuls, of
attention and of reduce-scatters, and makes the cheap rest again (arXiv 2205.05198); gathered
activations are large and gathered again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from koushi.parallel.collectives import REDUCE_SCATTER
from koushi.parallel.recomputed import Contexts, recomputed

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


def _selective() -> Contexts:
    keeping, giving = create_selective_checkpoint_contexts(_keep)
    return keeping, giving


def apply(block: nn.Module, mode: Literal["none", "selective", "full"]) -> nn.Module:
    """Make ``block`` recompute its forward during backward, in place; names stay as they are."""
    if mode == "none":
        return block
    options: dict[str, Any] = {"context_fn": _selective} if mode == "selective" else {}
    plain: Callable[..., Any] = block.forward

    def forward(*args: Any) -> Any:
        if torch.compiler.is_compiling():  # knows torch's own by name
            return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, **options)
        return recomputed(
            plain, *args, contexts=_selective() if mode == "selective" else (nullcontext(), nullcontext())
        )

    block.forward = forward
    return block
