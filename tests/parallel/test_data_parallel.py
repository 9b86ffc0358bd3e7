"""Data parallel on two ranks: units, and gradients that are sums."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import Check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from koushi.mesh import MeshSpec
from koushi.parallel import data
from koushi.parallel.device_mesh import build_mesh

WIDTH = 6


def submeshes() -> list[DeviceMesh]:
    """Sharded, and replicated: two ranks have no third way."""
    return [
        build_mesh(MeshSpec.of(dp_shard=2), "cpu")["dp_shard"],
        build_mesh(MeshSpec.of(dp_replicate=2), "cpu")["dp_replicate", "dp_shard"],
    ]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).double()


def options(**changed: object) -> data.DataParallel:
    given = {"compute": torch.float64, "reduce": torch.float64, "reshard_after_forward": True} | changed
    return data.DataParallel(**given)  # type: ignore[arg-type]


def inputs(rank: int) -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def whole(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor()


def expected_gradients(*batches: Tensor) -> list[Tensor]:
    plain = model()
    for x in batches:
        plain(x).pow(2).sum().backward()
    return [parameter.grad for parameter in plain.parameters()]


def gradients_are_sums_over_ranks() -> None:
    found = []
    for submesh in submeshes():
        net = model()
        data.apply(net, submesh, options(), [net[0], net[1]])
        net(inputs(dist.get_rank())).pow(2).sum().backward()
        found.append([whole(parameter) for parameter in net.parameters()])
    expected = expected_gradients(inputs(0), inputs(1))
    for gradients in found:
        for gradient, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, reference)


def microbatches_add_up_before_replicas_do() -> None:
    """What a backward keeps for a later one is reduced with it, once."""
    submesh = submeshes()[1]
    net = model()
    data.apply(net, submesh, options(), [net[0]])
    rank = dist.get_rank()
    for last in (False, True):
        data.reduce_replicas_now(net, last)
        net(inputs(rank + 10 * last)).pow(2).sum().backward()
    found = [whole(parameter) for parameter in net.parameters()]
    expected = expected_gradients(inputs(0), inputs(1), inputs(10), inputs(11))
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference)


def units_are_sharded_and_gathered_on_their_own() -> None:
    shard = submeshes()[0]
    found = []
    for reshard in (True, False):
        net = model()
        units = [net[0], net[1]]
        assert data.apply(net, shard, options(reshard_after_forward=reshard), units) is net
        assert all(isinstance(one, FSDPModule) for one in (net, *units))
        assert not isinstance(net[2], FSDPModule)
        assert all(parameter.placements == (Shard(0),) for parameter in net.parameters())
        assert all(parameter.to_local().shape == (WIDTH // 2, WIDTH) for parameter in net.parameters())
        net(inputs(0))
        found.append([isinstance(layer.weight, DTensor) for layer in net])
    assert found == [[True, True, False], [False, False, False]], "what stays gathered after forward"


def names_stay_as_they_are() -> None:
    net = model()
    names = [name for name, _ in net.named_parameters()]
    data.apply(net, submeshes()[0], options(), list(net))
    assert [name for name, _ in net.named_parameters()] == names


def dtypes_of_parameters_arithmetic_and_gradients() -> None:
    net = model().float()
    seen = []
    net[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    data.apply(net, submeshes()[0], options(compute=torch.bfloat16, reduce=torch.float32), [net[0]])
    net(inputs(dist.get_rank()).bfloat16()).float().pow(2).sum().backward()
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in net.parameters()} == {torch.float32}


def uneven_shards() -> None:
    """Five rows over two ranks are 3 and 2, as the layout says."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5, bias=False)).double()
    full = net[0].weight.detach().clone()
    data.apply(net, submeshes()[0], options(), [])
    rows = slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)
    assert torch.equal(net[0].weight.to_local(), full[rows])


def a_module_that_is_not_sharded_has_nothing_to_reduce() -> None:
    data.reduce_replicas_now(model(), False)


CHECKS: tuple[Check, ...] = (
    gradients_are_sums_over_ranks,
    microbatches_add_up_before_replicas_do,
    units_are_sharded_and_gathered_on_their_own,
    names_stay_as_they_are,
    dtypes_of_parameters_arithmetic_and_gradients,
    uneven_shards,
    a_module_that_is_not_sharded_has_nothing_to_reduce,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])
