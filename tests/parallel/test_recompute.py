"""Recompute: the same gradients, fewer bytes kept, and only what is cheap made again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.models.llama.model import Block, Rotary
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import recompute

SIZE = LlamaSize(vocab_size=8, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=48)
TOKENS = 16
MATMULS = 7
"""wq, wk, wv, wo, w1, w2, w3."""
MODES = ("none", "selective", "full")


class Watch(TorchDispatchMode):
    """Counts operations and remembers every storage they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes_alive(self, besides: Iterable[Tensor]) -> int:
        there = {one.untyped_storage()._cdata for one in besides}
        return sum(
            count
            for storage, (reference, count) in self.made.items()
            if storage not in there and not reference.expired()
        )

    def attentions(self) -> int:
        return sum(count for name, count in self.calls.items() if "attention" in name and "backward" not in name)


@dataclass(frozen=True)
class Outcome:
    out: Tensor
    gradients: dict[str, Tensor]
    kept: int
    """Bytes alive between forward and backward."""
    again: Watch
    """Of backward."""
    names: list[str]


def run(mode: Any) -> Outcome:
    torch.manual_seed(0)
    block = recompute.apply(Block(SIZE), mode)
    x = torch.randn(2, TOKENS, SIZE.dim, requires_grad=True)
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
