"""A compiled block computes what it did."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from koushi.config.schema import Training
from koushi.models.llama.model import Block, Rotary
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel.compose import recompute_and_compile

SIZE = LlamaSize(vocab_size=8, dim=16, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=24)


def run(block: Block) -> dict[str, Tensor]:
    x = torch.randn(2, 8, SIZE.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    cos, sin = Rotary(SIZE).tables(8, x.device, x.dtype)
    out = block(x, cos, sin)
    out.pow(2).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in block.named_parameters()}
    return gradients | {"output": out.detach(), "input": x.grad}


@pytest.mark.long
# Inductor's own imports use what torch calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("mode", ("none", "selective", "full"))
def test_a_compiled_block_gives_the_same_result(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    block = Block(SIZE).double()
    expected = run(block)
    block.zero_grad()
    names = list(block.state_dict())
    recompute_and_compile(block, Training(recompute=mode, compile=True))
    torch._dynamo.reset()
    counters.clear()
    kept: dict[int, int] = {id(parameter): 0 for parameter in block.parameters()}

    def pack(one: Tensor) -> Tensor:
        kept.setdefault(id(one), one.nbytes)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        found = run(block)
    assert list(block.state_dict()) == names
    assert counters["frames"]["ok"] > 0, "nothing was compiled"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    if mode == "selective":
        # x, q, mixed, wo's and the block's output; k, v; w1's and w3's output; attention's sums, cosines and sines.
        values = 16 * (5 * SIZE.dim + 2 * SIZE.n_kv_heads * SIZE.head_dim + 2 * SIZE.ffn_dim + SIZE.n_heads)
        assert sum(kept.values()) == 8 * (values + 8 * SIZE.head_dim), kept.values()
    if mode == "full":
        assert sum(kept.values()) == found["output"].nbytes, "more is kept than the output, which squaring keeps"
