"""FLOPs of what a rank runs: its matmuls and its attention, recompute with them.

A multiply and an add are two. Attention counts whole, the causal half not taken off; its backward
makes the scores again, so it is five products where the forward is two (arXiv 2205.14135).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from koushi.parallel.calls import Call, Operator
from koushi.parallel.ledger import Observer
from koushi.traffic import Phase

_aten = torch.ops.aten


def _mm(args: tuple[Any, ...]) -> int:
    m, k = args[0].shape
    return 2 * int(m) * int(k) * int(args[1].shape[1])


def _addmm(args: tuple[Any, ...]) -> int:
    return _mm(args[1:])


def _bmm(args: tuple[Any, ...]) -> int:
    batch, m, k = args[0].shape
    return 2 * int(batch) * int(m) * int(k) * int(args[1].shape[2])


def _scores(q: Tensor, k: Tensor) -> int:
    """Of one product of queries [B, H, T, E] and keys [B, G, S, E]."""
    batch, heads, tokens, channels = q.shape
    return 2 * batch * heads * tokens * k.shape[2] * channels


def _attention(args: tuple[Any, ...]) -> int:
    return 2 * _scores(args[0], args[1])


def _attention_backward(args: tuple[Any, ...]) -> int:
    """The gradient comes first."""
    return 5 * _scores(args[1], args[2])


FORMULAS: Mapping[Any, Callable[[tuple[Any, ...]], int]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten._scaled_dot_product_flash_attention.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_efficient_attention.default: _attention,
    _aten._scaled_dot_product_flash_attention_backward.default: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


_FORMULAS = {id(operator): formula for operator, formula in FORMULAS.items()}
"""By identity: an operator's hash is computed in Python."""


@dataclass(frozen=True)
class Work:
    """What one block, or a module beside the blocks, computes at a stretch."""

    after: int
    """How many collectives had been issued."""
    phase: Phase
    block: str
    """As ``block_of`` names it; empty: the model itself."""
    flops: int
    taken: int = 0
    """How many messages pipeline stages had taken."""


def block_of(module: str) -> str:
    """The block that a module is in, or what stands beside the blocks: ``layers.3``, ``output``."""
    pieces = module.split(".")
    return ".".join(pieces[: 2 if pieces[0] == "layers" else 1])


class FlopLog(Observer):
    """FLOPs by phase, how many had been done when each collective was issued, and who did them."""

    def __init__(self) -> None:
        self.place: Callable[[], tuple[Phase, str]] = lambda: ("start", "")
        self.taken: Callable[[], int] = lambda: 0
        """How many messages pipeline stages have taken."""
        self.phases: Counter[Phase] = Counter()
        self.total = 0
        self.before: list[int] = []
        self.works: list[Work] = []
        """In order; two that follow each other differ in more than their FLOPs."""

    def saw(
        self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, call: Call | None
    ) -> None:
        if call is not None:
            self.before.append(self.total)
        formula = _FORMULAS.get(id(operator))
        if formula is not None:
            flops = formula(args)
            phase, module = self.place()
            self.phases[phase] += flops
            self.total += flops
            self._add(Work(len(self.before), phase, block_of(module), flops, self.taken()))

    def _add(self, work: Work) -> None:
        if self.works:
            last = self.works[-1]
            if replace(last, flops=work.flops) == work:
                self.works[-1] = replace(last, flops=last.flops + work.flops)
                return
        self.works.append(work)
