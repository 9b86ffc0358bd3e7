"""Recompute: activations made again in backward instead of kept.

full keeps only a block's input (arXiv 1604.06174). selective keeps the outputs of matmuls, of
attention and of reduce-scatters, and makes the cheap rest again (arXiv 2205.05198); gathered
activations are large and gathered again.

Of these outputs two kinds are not kept, as backward needs neither: what a reduce-scatter adds up,
since its own output is kept, and what comes from a block's last matmul on, since no later operation
keeps its input. The torch function for selective recompute would make the first again in vain, so
outside of ``torch.compile``, which finds both by itself, it is two modes of our own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from koushi.parallel.calls import Operator
from koushi.parallel.collectives import REDUCE_SCATTER
from koushi.parallel.recomputed import Contexts, recomputed

MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default})
KEPT = MATMULS | {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    REDUCE_SCATTER,
}

_NOTHING = torch.empty((), device="meta")
"""Stands for what is neither kept nor made again; whoever computes with it fails."""
_NOTHING.untyped_storage().resize_(0)

_Outputs = deque[tuple[Operator, Any]]
"""Of the operations of ``KEPT``, in their order; None: to be made again, if backward gets there."""


@final
class Keeping(TorchDispatchMode):
    """Of forward: keeps outputs."""

    def __init__(self, outputs: _Outputs):
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._sums: dict[int, int] = {}
        """By the place of an output that was let go, that of the reduce-scatter it went into."""

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            assert self._kept(args[0]) is None, f"{func} writes into what selective recompute keeps"
        out = func(*args, **(kwargs or {}))
        if func is REDUCE_SCATTER:
            terms = self._kept(args[0])
            if terms is not None:
                made_by, kept = self._outputs[terms]
                self._outputs[terms] = (made_by, _NOTHING.expand(kept.shape))
                self._sums[terms] = len(self._outputs)
        if func in KEPT:
            self._outputs.append((func, _detached(out)))
        return out

    def _kept(self, tensor: Tensor) -> int | None:
        """The last output in whose memory ``tensor`` lies."""
        storage = tensor.untyped_storage()
        for index in reversed(range(len(self._outputs))):
            out = self._outputs[index][1]
            if any(isinstance(one, Tensor) and one.untyped_storage() is storage for one in _each(out)):
                return index
        return None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        last = max((index for index, (func, _) in enumerate(self._outputs) if func in MATMULS), default=0)
        for index, (func, _) in enumerate(self._outputs):
            if max(index, self._sums.get(index, 0)) >= last:
                self._outputs[index] = (func, None)


@final
class Giving(TorchDispatchMode):
    """Of the forward that backward runs again: gives what was kept, each once."""

    def __init__(self, outputs: _Outputs):
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in KEPT:
            return func(*args, **(kwargs or {}))
        assert self._outputs, f"{func}: the second run takes another way than forward"
        made_by, out = self._outputs.popleft()
        assert made_by is func, f"{func} is called where forward called {made_by}"
        return func(*args, **(kwargs or {})) if out is None else out


def _each(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _detached(out: Any) -> Any:
    """Without the graph that autograd is about to hang on it, which holds what is kept."""
    if isinstance(out, tuple):
        return tuple(map(_detached, out))
    return out.detach() if isinstance(out, Tensor) else out


def policy(context: Any, func: Operator, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """torch's, for what is compiled: which outputs are kept. Which of these backward needs, torch.compile finds."""
    return CheckpointPolicy.MUST_SAVE if func in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _compiled() -> Contexts:
    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, again


def contexts(mode: Literal["selective", "full"]) -> Contexts:
    """Of forward, and of the forward that backward runs again."""
    if mode == "full":
        return nullcontext(), nullcontext()
    outputs: _Outputs = deque()
    return Keeping(outputs), Giving(outputs)


def apply(block: nn.Module, mode: Literal["none", "selective", "full"]) -> nn.Module:
    """Make ``block`` recompute its forward during backward, in place; names stay as they are."""
    if mode == "none":
        return block
    plain: Callable[..., Any] = block.forward

    def forward(*args: Any) -> Any:
        if mode == "selective" and torch.compiler.is_compiling():  # knows torch's own by name
            return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_compiled)
        return recomputed(plain, *args, contexts=contexts(mode))

    block.forward = forward
    return block
