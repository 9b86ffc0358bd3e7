"""The ledger: what each kind of call is recorded as, whom it serves, and what belongs to no group of the mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import Check
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules

from koushi.mesh import MeshSpec
from koushi.parallel.calls import reader
from koushi.parallel.collectives import gather, scatter_sum
from koushi.parallel.ledger import Event, Recorder, submesh_name

MESH = MeshSpec.of(dp_shard=2)
HERE = "tests/parallel/test_ledger.py"


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def recorded(work, part: nn.Module | None = None, mesh: MeshSpec = MESH) -> tuple[Event, ...]:  # type: ignore[no-untyped-def]
    with Recorder(mesh, {} if part is None else {0: part}) as recorder:
        work()
    return recorder.ledger().events


def kinds(events: tuple[Event, ...]) -> list[tuple[object, ...]]:
    return [(one.collective.operation, one.collective.dtype, one.collective.bytes, one.reduction) for one in events]


def calls_of_torch_distributed_are_recorded_by_their_larger_side() -> None:
    x, whole = torch.ones(3), torch.empty(6)

    def work() -> None:
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.all_gather([torch.empty(3), torch.empty(3)], x)
        dist.reduce_scatter(torch.empty(3), [x, x.clone()])
        dist.all_to_all_single(whole, torch.ones(6))
        dist.broadcast(x.double(), src=0)
        dist.barrier()

    events = recorded(work)
    assert kinds(events)[:6] == [
        ("all_reduce", "float32", 12, "sum"),
        ("all_reduce", "float32", 12, "max"),
        ("all_gather", "float32", 24, ""),
        ("reduce_scatter", "float32", 24, "sum"),
        ("all_to_all", "float32", 24, ""),
        ("broadcast", "float64", 24, ""),
    ]
    assert events[6].collective.operation == "barrier"
    assert all(one.collective.submesh == "dp_shard" and one.ranks == (0, 1) for one in events)
    assert all(one.site.file.endswith("test_ledger.py") and one.site.line > 1 for one in events)
    assert [one.number for one in events] == list(range(7))


def functional_collectives_are_recorded() -> None:
    functional, name = torch.ops._c10d_functional, world().group_name

    def work() -> None:
        x = torch.ones(4, dtype=torch.bfloat16)
        functional.wait_tensor(functional.all_reduce(x, "sum", name))
        functional.wait_tensor(functional.all_gather_into_tensor(x, 2, name))
        functional.wait_tensor(functional.reduce_scatter_tensor(x.float(), "sum", 2, name))
        functional.wait_tensor(functional.all_to_all_single(x, [2, 2], [2, 2], name))

    assert kinds(recorded(work)) == [
        ("all_reduce", "bfloat16", 8, "sum"),
        ("all_gather", "bfloat16", 16, ""),
        ("reduce_scatter", "float32", 16, "sum"),
        ("all_to_all", "bfloat16", 8, ""),
    ]


def own_operators_are_one_event_whatever_carries_them_out() -> None:
    x = torch.ones(1, 4, 3, requires_grad=True)

    def work() -> None:
        scatter_sum(gather(x, 1, world()), 1, world()).sum().backward()

    events = recorded(work)
    assert kinds(events) == [("all_gather", "float32", 96, ""), ("reduce_scatter", "float32", 96, "sum")] * 2
    assert [one.collective.phase for one in events] == ["start", "start", "backward", "backward"]


def messages_name_the_other_rank() -> None:
    rank, x = dist.get_rank(), torch.ones(2)

    def work() -> None:
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)

    (event,) = recorded(work)
    assert kinds((event,)) == [("recv" if rank else "send", "float32", 8, "")]
    assert event.peer == 1 - rank


def a_message_of_a_pipeline_that_no_stage_has_made_is_refused() -> None:
    """Whether it is an activation or a gradient nothing says."""
    rank, x = dist.get_rank(), torch.ones(2)
    message = dist.P2POp(dist.irecv if rank else dist.isend, x, 1 - rank)
    refused = pytest.raises(AssertionError, match=f"a {'recv' if rank else 'send'} of a pipeline which none of its")
    with refused, Recorder(MESH, {}, run=lambda *_: None):  # nothing is sent
        schedules._batch_p2p([message])


def a_group_of_no_dim_keeps_its_ranks() -> None:
    alone = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    (event,) = recorded(lambda: dist.all_reduce(torch.ones(1), group=alone))
    assert event.collective.submesh == f"ranks {dist.get_rank()}" and event.ranks == (dist.get_rank(),)


class Block(nn.Module):
    """Sums over the ranks in its forward, and so in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return gather(scatter_sum(self.inner(x), 1, world()), 1, world())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def events_name_their_module_and_phase() -> None:
    """In backward by what autograd goes back through; gradients that FSDP reduces by whose they are."""
    model = Model()
    for part in (model.first, model.second):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))

    def work() -> None:
        dist.all_reduce(torch.ones(1))
        model(torch.ones(1, 2, 4)).sum().backward()
        dist.all_reduce(torch.ones(1))

    events = recorded(work, model)
    found = [(one.collective.operation, one.collective.phase, one.module) for one in events]
    forward = [
        (operation, "forward", name)
        for name in ("first", "second")
        for operation in ("all_gather", "reduce_scatter", "all_gather")
    ]
    assert found[0] == ("all_reduce", "start", "")
    assert found[1:7] == forward
    assert found[-1] == ("all_reduce", "optimizer", "")
    backward = found[7:-1]
    assert {phase for _, phase, _ in backward} == {"backward"}
    for name in ("first", "second"):
        operations = sorted(operation for operation, _, module in backward if module == name)
        # Back through both collectives, then gradients reduced.
        assert operations == ["all_gather", "reduce_scatter", "reduce_scatter"], (name, found)


def recording_changes_nothing_and_leaves_nothing() -> None:
    model, x = Model(), torch.randn(1, 2, 4)
    before = model(x)
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    outs: list[Tensor] = []
    recorded(lambda: outs.append(model(x)), model)
    after = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    assert torch.equal(outs[0], before)
    assert hooks == after


def an_error_inside_leaves_no_hooks() -> None:
    model = Model()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recorded(fail, model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


CHECKS: tuple[Check, ...] = (
    calls_of_torch_distributed_are_recorded_by_their_larger_side,
    functional_collectives_are_recorded,
    own_operators_are_one_event_whatever_carries_them_out,
    messages_name_the_other_rank,
    a_message_of_a_pipeline_that_no_stage_has_made_is_refused,
    a_group_of_no_dim_keeps_its_ranks,
    events_name_their_module_and_phase,
    recording_changes_nothing_and_leaves_nothing,
    an_error_inside_leaves_no_hooks,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])


def test_groups_are_named_by_the_dims_along_which_their_ranks_differ() -> None:
    mesh = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    for names in (("tp",), ("dp_shard",), ("dp_replicate", "dp_shard"), ("pp", "tp"), mesh.names):
        present = ",".join(name for name in names if mesh.degree(name) > 1)
        assert all(submesh_name(mesh, group) == present for group in mesh.groups(*names))
    assert submesh_name(mesh, (0, 3)) is None
    assert submesh_name(mesh, (0, 1, 2)) is None
    assert submesh_name(mesh, (1, 0)) is None
    assert submesh_name(mesh, (5,)) is None


def test_a_collective_that_cannot_be_read_is_not_missed() -> None:
    assert reader(torch.ops.aten.add.Tensor) is None
    assert reader(torch.ops._c10d_functional.wait_tensor.default) is None
    with pytest.raises(NotImplementedError, match="batch_p2p_ops"):
        reader(torch.ops._c10d_functional.batch_p2p_ops.default)


def test_every_collective_of_torch_can_be_read_but_for_known_ones() -> None:
    """When torch gains one, this names it."""
    schemas = torch._C._jit_get_all_schemas()
    names = {one.name for one in schemas if one.name.startswith(("c10d::", "_c10d_functional::"))}
    assert len(names) > 30
    unread = set()
    for name in names:
        space, short = name.split("::")
        operator = getattr(getattr(torch.ops, space), short).default
        try:
            reader(operator)
        except NotImplementedError:
            unread.add(short)
    assert unread == {"batch_p2p_ops"}
