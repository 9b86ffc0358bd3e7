"""What is made again: once, on whichever way backward comes, and no longer than the graph needs it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from koushi.models.llama.model import Block, Rotary
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import recompute
from koushi.parallel.recomputed import recomputed

SIZE = LlamaSize(vocab_size=8, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48)
NOTHING = (nullcontext(), nullcontext())


class Counted(nn.Module):
    """A block that tells how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(SIZE)
        self.runs = 0

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.inner(x, cos, sin)
        return out


class Stage(nn.Module):
    def __init__(self, mode: Any):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(recompute.apply(Counted(), mode) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tables = Rotary(SIZE).tables(x.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, *tables)
        return x


def whole(stage: Stage, x: Tensor, gradient: Tensor) -> None:
    stage(x).backward(gradient)


def in_two(stage: Stage, x: Tensor, gradient: Tensor) -> None:
    """As pipeline schedules with split backwards do."""
    out = stage(x)
    _, groups = stage_backward_input([out], [gradient], [x], stage.parameters())
    stage_backward_weight(stage.parameters(), groups)


@pytest.mark.parametrize("mode", ("selective", "full"))
@pytest.mark.parametrize("backward", (whole, in_two), ids=lambda one: one.__name__)
def test_gradients_are_the_same_and_the_block_runs_twice(mode: str, backward: Callable[..., None]) -> None:
    found = {}
    for how in ("none", mode):
        stage = Stage(how)
        x = torch.randn(2, 16, SIZE.dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
        backward(stage, x, torch.ones_like(x))
        assert [block.runs for block in stage.blocks] == [1 if how == "none" else 2] * 2
        assert x.grad is not None
        found[how] = [x.grad, *(parameter.grad for parameter in stage.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found["none"], found[mode], strict=True))


def test_two_microbatches_are_apart() -> None:
    """Both forwards before both backwards, each in two halves that another's come between."""
    found = {}
    for how in ("none", "full"):
        stage = Stage(how)
        inputs = [torch.full((1, 4, SIZE.dim), 0.1 * (index + 1)).requires_grad_() for index in range(2)]
        outs = [stage(x) for x in inputs]
        halves = [
            stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())[1]
            for out, x in zip(outs, inputs, strict=True)
        ]
        for groups in reversed(halves):
            stage_backward_weight(stage.parameters(), groups)
        found[how] = [*(x.grad for x in inputs), *(parameter.grad for parameter in stage.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found["none"], found["full"], strict=True))


def test_nothing_is_kept_until_backward_and_nothing_after() -> None:
    made: list[weakref.ref[Any]] = []

    def function(x: Tensor) -> Tensor:
        inner = x.exp()
        made.append(weakref.ref(inner.untyped_storage()))
        return inner.sin() * 2

    x = torch.ones(8, requires_grad=True)
    gc.disable()
    try:
        out = recomputed(function, x, contexts=NOTHING)
        assert [one() for one in made] == [None]
        out.sum().backward()
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(8).exp().cos() * 2 * torch.ones(8).exp())


def test_the_second_run_ends_where_backward_needs_no_more() -> None:
    reached: list[str] = []

    def function(x: Tensor) -> Tensor:
        reached.append("begin")
        out = x.sin()
        reached.append("end")
        return out + 1

    x = torch.ones(2, requires_grad=True)
    recomputed(function, x, contexts=NOTHING).sum().backward()
    assert reached == ["begin", "end", "begin"]


def test_a_function_that_takes_another_way_the_second_time_is_found() -> None:
    runs: list[int] = []

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x * 2.0

    out = recomputed(function, torch.ones(2, requires_grad=True), contexts=NOTHING)
    with pytest.raises(AssertionError, match="took another way"):
        out.sum().backward()


def test_without_gradients_it_is_the_function() -> None:
    with torch.no_grad():
        assert torch.equal(recomputed(torch.sin, torch.ones(2), contexts=NOTHING), torch.ones(2).sin())
