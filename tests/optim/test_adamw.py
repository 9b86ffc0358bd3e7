"""AdamW against torch's own and against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from koushi.config.schema import Optimizer
from koushi.optim.adamw import AdamW

OPTIONS = Optimizer(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
SHAPES = {"matrix": (5, 7), "long": (300,), "norm": (7,), "cube": (2, 3, 4)}
DECAYED = {"matrix", "cube"}
RATES = (0.1, 0.03, 0.2, 0.0, 0.05)


def draw(dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def torchs_own(dtype: torch.dtype, fused: bool) -> dict[str, Tensor]:
    parameters = draw(dtype, 0)
    groups = [
        {"params": [value for name, value in parameters.items() if (name in DECAYED) is decays], "weight_decay": decay}
        for decays, decay in ((True, OPTIONS.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(OPTIONS.beta1, OPTIONS.beta2), eps=OPTIONS.eps, fused=fused, foreach=False
    )
    for step, lr in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, gradient in draw(dtype, step + 1).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in parameters.items()} | {
        f"{name} {kind}": optimizer.state[value][kind]
        for name, value in parameters.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }


def ours(dtype: torch.dtype) -> dict[str, Tensor]:
    parameters = draw(dtype, 0)
    optimizer = AdamW(OPTIONS)
    for step, lr in enumerate(RATES):
        optimizer.step(parameters, draw(dtype, step + 1), DECAYED, lr)
    assert optimizer.steps == len(RATES)
    return parameters | {
        f"{name} {kind}": getattr(moments, kind)
        for name, moments in optimizer.moments.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_updates_and_state_are_those_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    expected, found = torchs_own(dtype, fused=True), ours(dtype)
    assert expected.keys() == found.keys()
    assert len(found) == 3 * len(SHAPES)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    unfused = torchs_own(dtype, fused=False)
    for name, value in unfused.items():
        torch.testing.assert_close(found[name], value)


def test_updates_follow_the_formula() -> None:
    value, mean, square = 0.7, 0.0, 0.0
    parameters = {"one": torch.tensor([value], dtype=torch.float64)}
    optimizer = AdamW(OPTIONS)
    for step, (lr, gradient) in enumerate(((0.1, 0.5), (0.2, -2.0), (0.05, 1e-3)), start=1):
        optimizer.step(parameters, {"one": torch.tensor([gradient], dtype=torch.float64)}, {"one"}, lr)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        value -= lr * 0.3 * value
        value -= lr * (mean / (1 - 0.8**step)) / (math.sqrt(square / (1 - 0.9**step)) + 1e-6)
        assert parameters["one"].item() == pytest.approx(value, rel=1e-12)


def test_updates_are_in_place_and_empty_shards_have_no_state() -> None:
    matrix, empty = torch.ones(2, 3), torch.empty(0, 3)
    optimizer = AdamW(OPTIONS)
    for _ in range(2):
        optimizer.step({"a": matrix, "b": empty}, {"a": torch.ones(2, 3), "b": torch.empty(0, 3)}, {"a", "b"}, 0.1)
    assert (matrix < 1).all()
    assert list(optimizer.moments) == ["a"]
    assert optimizer.steps == 2


def test_a_rank_whose_shards_are_all_empty_counts_its_steps() -> None:
    optimizer = AdamW(OPTIONS)
    optimizer.step({"a": torch.empty(0)}, {"a": torch.empty(0)}, set(), 0.1)
    assert (optimizer.steps, optimizer.moments) == (1, {})


def test_parts_of_a_tensor_are_updated_as_the_whole_is() -> None:
    """An elementwise update needs no other rank."""
    whole = {"a": torch.arange(12.0).view(4, 3)}
    parts = {"a": torch.arange(12.0).view(4, 3)[:3], "b": torch.arange(12.0).view(4, 3)[3:]}
    gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    together, apart = AdamW(OPTIONS), AdamW(OPTIONS)
    for _ in range(3):
        together.step(whole, {"a": gradient}, {"a"}, 0.1)
        apart.step(parts, {"a": gradient[:3], "b": gradient[3:]}, {"a", "b"}, 0.1)
    torch.testing.assert_close(torch.cat((parts["a"], parts["b"])), whole["a"], rtol=1e-6, atol=0)
    assert parts["a"].untyped_storage().data_ptr() == parts["a"].data_ptr()
