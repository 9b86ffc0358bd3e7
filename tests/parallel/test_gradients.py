"""What is left to do with gradients after backward, on two ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tiny import Check
from torch import Tensor, nn

from koushi.layout import Placement, Replicate, Shard
from koushi.models.llama.layout import Parameter
from koushi.parallel import gradients
from koushi.parallel.shards import LocalParameter

CUT = Shard(0)


@dataclass(frozen=True)
class Held:
    name: str
    gradient: tuple[float, ...]
    tp: Placement = CUT
    counted: bool = True

    def parameter(self, dtype: torch.dtype = torch.float64) -> LocalParameter:
        values = nn.Parameter(torch.zeros(len(self.gradient), dtype=dtype))
        values.grad = torch.tensor(self.gradient, dtype=dtype)
        described = Parameter(self.name, (len(self.gradient),), self.tp, None)
        return LocalParameter(self.name, described, values, (slice(0, len(self.gradient)),), self.counted)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def lists(parameters: list[LocalParameter]) -> list[list[float]]:
    return [parameter.gradient.tolist() for parameter in parameters]


def copied_parameters_are_summed_over_tp_and_cut_ones_are_not() -> None:
    rank = dist.get_rank()
    held = [
        Held("norm.weight", (1.0 + rank, 5.0), Replicate()).parameter(),
        Held("cut", (float(rank),)).parameter(),
        Held("wk", (10.0 * rank,), Replicate()).parameter(),
    ]
    gradients.finish(held, {"tp": world()}, None)
    assert lists(held) == [[3.0, 10.0], [float(rank)], [10.0]]


def without_tp_and_ties_nothing_happens() -> None:
    held = [Held("norm.weight", (1.0,), Replicate()).parameter()]
    gradients.finish(held, {"dp_shard": world()}, None)
    assert lists(held) == [[1.0]]


def two_ends_of_a_tied_embedding_are_added_up() -> None:
    rank = dist.get_rank()
    names = ("tok_embeddings.weight", "output.weight")
    held = [Held(names[rank], (1.0 + rank, 10.0 * rank)).parameter(), Held("other", (7.0,)).parameter()]
    gradients.finish(held, {"pp": world()}, (0, 1))
    assert lists(held) == [[3.0, 10.0], [7.0]]


def two_ends_on_one_rank_are_added_up_and_others_take_no_part() -> None:
    rank = dist.get_rank()
    held = [Held(name, (1.0 + rank, 2.0)).parameter() for name in ("tok_embeddings.weight", "output.weight")]
    gradients.finish(held, {"pp": world()}, (0, 0))
    assert lists(held) == ([[2.0, 4.0]] * 2 if rank == 0 else [[2.0, 2.0]] * 2)


def scalars_are_summed_where_they_differ() -> None:
    """The loss is whole on every tp rank, the norm on every replica."""
    rank = dist.get_rank()
    found = {}
    for name in ("dp_replicate", "dp_shard", "tp", "pp"):
        loss, squared = gradients.sum_scalars(torch.tensor(1.0 + rank), torch.tensor(10.0 + rank), {name: world()})
        found[name] = (loss.item(), squared.item())
    alone = gradients.sum_scalars(torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float64), {})
    assert found == {
        "dp_replicate": (3.0, 10.0 + rank),
        "dp_shard": (3.0, 21.0),
        "tp": (1.0 + rank, 21.0),
        "pp": (3.0, 21.0),
    }
    assert [one.item() for one in alone] == [1.0, 2.0]
    assert {one.dtype for one in alone} == {torch.float64}


CHECKS: tuple[Check, ...] = (
    copied_parameters_are_summed_over_tp_and_cut_ones_are_not,
    without_tp_and_ties_nothing_happens,
    two_ends_of_a_tied_embedding_are_added_up,
    two_ends_on_one_rank_are_added_up_and_others_take_no_part,
    scalars_are_summed_where_they_differ,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])


def test_the_norm_is_of_what_is_counted() -> None:
    held = [
        Held("a", (3.0, 4.0)).parameter(),
        Held("b", (100.0,), counted=False).parameter(),
        Held("c", (12.0,)).parameter(),
        Held("empty", ()).parameter(),
    ]
    assert gradients.squared_norm(held).item() == pytest.approx(169.0)
    nothing = gradients.squared_norm([Held("b", (100.0,), counted=False).parameter()])
    assert (nothing.item(), nothing.dtype, nothing.shape) == (0.0, torch.float64, ())


def clipped(highest: float) -> Tensor:
    held = [Held("a", (3.0, 4.0)).parameter(), Held("b", (12.0,), counted=False).parameter()]
    gradients.clip(held, torch.tensor(13.0, dtype=torch.float64), highest)
    return torch.cat([one.gradient for one in held])


def test_gradients_are_clipped_as_torch_clips_them() -> None:
    plain = [nn.Parameter(torch.zeros(2, dtype=torch.float64)), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    plain[0].grad, plain[1].grad = torch.tensor([3.0, 4.0]).double(), torch.tensor([12.0]).double()
    norm = torch.nn.utils.clip_grad_norm_(plain, 2.0)
    assert norm.item() == pytest.approx(13.0)
    assert torch.equal(clipped(2.0), torch.cat([one.grad for one in plain]))
    assert clipped(2.0).norm().item() == pytest.approx(2.0, rel=1e-6)
    assert clipped(50.0).tolist() == [3.0, 4.0, 12.0], "a small gradient is left as it is"


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    held = [Held("a", (math.inf, 1.0)).parameter()]
    norm = gradients.squared_norm(held).sqrt()
    assert not norm.isfinite()
