"""Recompute: the same gradients, fewer bytes kept, and only what is cheap made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watch import Watch

from koushi.mesh import MeshSpec
from koushi.models.llama.model import Block, Rotary
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import recompute
from koushi.plan.lifetimes import forward_span
from koushi.plan.stages import stage_of
from koushi.plan.workload import Transformer, Workload

SIZE = LlamaSize(vocab_size=8, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48)
TOKENS = 16
MATMULS = 7
"""wq, wk, wv, wo, w1, w2, w3."""
MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Outcome:
    out: Tensor
    gradients: dict[str, Tensor]
    kept: int
    """Bytes alive between forward and backward."""
    again: Watch
    """Of backward."""
    names: list[str]


def run(mode: Any, dtype: torch.dtype = torch.float32) -> Outcome:
    torch.manual_seed(0)
    block = recompute.apply(Block(SIZE).to(dtype), mode)
    x = torch.randn(2, TOKENS, SIZE.dim, dtype=dtype, requires_grad=True)
    cos, sin = Rotary(SIZE).tables(TOKENS, x.device, x.dtype)
    with Watch() as forward:
        out = block(x, cos, sin)
    kept = forward.bytes_alive((*block.parameters(), x, cos, sin))
    with Watch() as backward:
        out.pow(2).sum().backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()} | {"input": x.grad}
    return Outcome(out.detach(), gradients, kept, backward, list(block.state_dict()))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {mode: run(mode) for mode in MODES}


@pytest.mark.parametrize("mode", ("selective", "full"))
def test_output_gradients_and_names_are_the_same(mode: str, outcomes: dict[str, Outcome]) -> None:
    found, expected = outcomes[mode], outcomes["none"]
    assert torch.equal(found.out, expected.out)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    assert found.names == expected.names == list(Block(SIZE).state_dict())


def test_fewer_bytes_are_kept(outcomes: dict[str, Outcome]) -> None:
    activation = 2 * TOKENS * SIZE.dim * 4
    kept = {mode: outcomes[mode].kept for mode in MODES}
    assert kept["full"] < 2 * activation, "no more than a block's output"
    assert 4 * activation < kept["selective"] < 0.8 * kept["none"], kept


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_selective_keeps_what_is_planned(dtype: torch.dtype) -> None:
    """q, k, v, attention with its sums, wo, w1, w3: no output of w2. And the block's output, which is not its own."""
    outcome = run("selective", dtype)
    key = SIZE.n_kv_heads * SIZE.head_dim
    values = 2 * TOKENS * (3 * SIZE.dim + 2 * key + 2 * SIZE.ffn_dim)
    expected = values * dtype.itemsize + 2 * TOKENS * SIZE.n_heads * 4
    assert outcome.kept - outcome.out.nbytes == expected
    workload = Workload(
        Transformer.of(SIZE),
        MeshSpec.of(),
        (1,),
        "1F1B",
        TOKENS,
        microbatch_size=2,
        microbatches=1,
        recompute="selective",
        compute=str(dtype).removeprefix("torch."),
    )
    ((block, _),) = stage_of(workload, 0, "cpu").blocks(True)
    assert forward_span(block).growth - outcome.out.nbytes == expected


class Reused(nn.Module):
    """Two products, the first of which leads to nothing but the second; with what else an instance is told to do."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        return self.then(one, self.second(one))


def test_the_last_product_is_made_again_where_backward_needs_it() -> None:
    found = {}
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        module = recompute.apply(Reused(lambda one, two: one * two.sin()), mode)
        x = torch.randn(2, 3, requires_grad=True)
        out = module(x)
        with Watch() as backward:
            out.sum().backward()
        found[mode] = (x.grad, backward.calls["mm"])
    assert torch.equal(found["none"][0], found["selective"][0])
    assert found["selective"][1] == found["none"][1] + 1


def test_an_output_that_is_kept_may_not_be_written_to() -> None:
    module = recompute.apply(Reused(lambda one, two: one.add_(1) * two), "selective")
    with pytest.raises(AssertionError, match=r"add_\.Tensor writes into what selective recompute keeps"):
        module(torch.randn(2, 3, requires_grad=True))


def test_backward_may_go_through_twice() -> None:
    module = recompute.apply(Reused(lambda one, two: one * two), "selective")
    x = torch.randn(2, 3, requires_grad=True)
    loss = module(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_only_what_is_cheap_is_made_again(outcomes: dict[str, Outcome]) -> None:
    matmuls = {mode: outcomes[mode].again.calls["mm"] for mode in MODES}
    assert matmuls["none"] == 2 * MATMULS
    assert matmuls["selective"] == matmuls["none"], "matmuls were made again"
    assert matmuls["full"] > matmuls["none"]
    attentions = {mode: outcomes[mode].again.attentions() for mode in MODES}
    assert attentions == {"none": 0, "selective": 0, "full": 1}
    silus = {mode: outcomes[mode].again.calls["silu"] for mode in MODES}
    assert silus == {"none": 0, "selective": 1, "full": 1}


def test_none_changes_nothing() -> None:
    block = nn.Linear(2, 2)
    assert recompute.apply(block, "none") is block
    assert "forward" not in vars(block)


@pytest.mark.parametrize("mode", ("selective", "full"))
def test_what_is_saved_outside_is_only_the_output(mode: str) -> None:
    """torch's own account: a recomputed block hands autograd nothing of its own to save."""

    def saved_bytes(how: Any) -> int:
        torch.manual_seed(0)
        block = recompute.apply(Block(SIZE), how)
        x = torch.randn(2, TOKENS, SIZE.dim, requires_grad=True)
        cos, sin = Rotary(SIZE).tables(TOKENS, x.device, x.dtype)
        weights = {parameter.data_ptr() for parameter in block.parameters()}
        seen: dict[int, int] = {}

        def pack(one: Tensor) -> Tensor:
            if one.data_ptr() not in weights:
                seen[one.data_ptr()] = one.nbytes
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            block(x, cos, sin)
        return sum(seen.values())

    assert saved_bytes(mode) < 0.2 * saved_bytes("none")
