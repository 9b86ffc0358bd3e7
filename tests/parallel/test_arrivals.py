"""Every collective of a rank stands in its book, whoever calls it, and others can read it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import Check
from torch import nn
from torch.distributed.fsdp import fully_shard

from koushi.mesh import MeshSpec
from koushi.parallel import arrivals
from koushi.parallel.collectives import all_gather, reduce_scatter
from koushi.parallel.device_mesh import build_mesh
from koushi.train.records import Channel, Record, process_state, python_stack, read_books


def mine() -> Record:
    arrivals.open_book(dist.get_rank())
    folder = arrivals.book_folder()
    assert folder is not None
    return read_books(folder)[dist.get_rank()]


def channels() -> dict[tuple[str, int | None, bool], Channel]:
    return {(one.group, one.peer, one.outward): one for one in mine().channels}


def collectives(group: dist.ProcessGroup) -> Channel:
    return channels()[group.group_name, None, False]


def calls_on(group: dist.ProcessGroup) -> int:
    found = channels().get((group.group_name, None, False))
    return found.started.count if found is not None else 0


def a_collective_stands_there_until_it_is_waited_for() -> None:
    arrivals.open_book(dist.get_rank())
    arrivals.at_step(7)
    group = dist.new_group()
    dist.barrier(group)
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    begun = collectives(group)
    work.wait()
    done = collectives(group)
    assert (begun.submesh, begun.waiting) == (arrivals.ALL_RANKS, None)
    assert (begun.started.operation, begun.started.size, begun.started.step) == ("all_reduce", 20, 7)
    assert begun.finished is not None and begun.finished.operation == "barrier"
    assert done.finished is not None and done.finished.operation == "all_reduce"
    assert done.started.count == done.finished.count == begun.started.count
    record = mine()
    assert (record.process, record.step, record.state) == (os.getpid(), 7, process_state(os.getpid()))


def messages_have_a_channel_each_way() -> None:
    arrivals.open_book(dist.get_rank())
    rank, group = dist.get_rank(), dist.new_group()
    peer = 1 - rank
    for size in (3, 4):
        ops = [
            dist.P2POp(dist.isend, torch.ones(size), peer, group),
            dist.P2POp(dist.irecv, torch.ones(size), peer, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    out, back = channels()[group.group_name, peer, True], channels()[group.group_name, peer, False]
    for one, operation in ((out, "send"), (back, "recv")):
        assert one.finished is not None and one.finished.count == 2
        assert (one.started.operation, one.started.count, one.started.size) == (operation, 2, 16)


def our_own_operators_are_noted_on_their_sub_mesh() -> None:
    arrivals.open_book(dist.get_rank())
    group = build_mesh(MeshSpec.of(tp=2), "cpu").get_group("tp")
    before = calls_on(group)
    all_gather(torch.ones(2, 3), 0, group)
    gathered = collectives(group)
    reduce_scatter(torch.ones(2, 3), 0, group)
    scattered = collectives(group)
    assert (gathered.submesh, gathered.started.operation, gathered.started.size) == ("tp", "all_gather", 48)
    assert (scattered.started.operation, scattered.started.size) == ("reduce_scatter", 24)
    assert scattered.started.count == before + 2
    assert scattered.finished is not None and scattered.finished.count == before + 2


def fsdp_is_noted_call_by_call() -> None:
    """An all-gather forward, a reduce-scatter backward: the private methods that torch calls are those we note."""
    arrivals.open_book(dist.get_rank())
    mesh = build_mesh(MeshSpec.of(dp_shard=2), "cpu")["dp_shard"]
    linear = nn.Linear(4, 4, bias=False)
    fully_shard(linear, mesh=mesh)
    before = calls_on(mesh.get_group())
    loss = linear(torch.ones(1, 4)).sum()
    forward = collectives(mesh.get_group())
    loss.backward()
    backward = collectives(mesh.get_group())
    assert (forward.started.operation, forward.started.size) == ("all_gather", 64), "torch gathers another way"
    assert (backward.started.operation, backward.started.size) == ("reduce_scatter", 64), "torch scatters another way"
    assert (forward.started.count, backward.started.count) == (before + 1, before + 2)
    assert forward.finished is not None and forward.finished.count == before + 1, "torch no longer calls Work.wait"
    assert forward.submesh == "dp_shard"


def a_rank_tells_where_it_is_in_python() -> None:
    arrivals.open_book(dist.get_rank())
    folder = arrivals.book_folder()
    assert folder is not None
    record = read_books(folder)[dist.get_rank()]
    stack = python_stack(folder, record)
    dist.barrier()
    assert any("in a_rank_tells_where_it_is_in_python" in line for line in stack), stack


CHECKS: tuple[Check, ...] = (
    a_collective_stands_there_until_it_is_waited_for,
    messages_have_a_channel_each_way,
    our_own_operators_are_noted_on_their_sub_mesh,
    fsdp_is_noted_call_by_call,
    a_rank_tells_where_it_is_in_python,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])


def test_every_method_that_torch_may_call_is_there_under_one_of_its_names() -> None:
    here = {arrivals._CALLS[name][0] for name in arrivals._CALLS if name in vars(dist.ProcessGroup)}
    assert here == set(arrivals.OPERATIONS), "parallel/arrivals.py: ProcessGroup has other methods"


def test_more_channels_than_fit_are_left_out(tmp_path: Path) -> None:
    book = arrivals.Book(tmp_path, 3)
    for number in range(arrivals.CHANNELS + 5):
        channel = book.channel(f"group {number}")
        if channel is not None:
            channel.start(0, number)
    record = read_books(tmp_path)[3]
    assert len(record.channels) == arrivals.CHANNELS
    assert record.channels[-1].started.size == arrivals.CHANNELS - 1
    book.remove()
    assert not tmp_path.exists()


def test_a_folder_that_is_not_ours_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError) as caught:
        arrivals.Book(tmp_path / "link", 0)
    assert caught.value.errno == errno.EPERM
    assert not (tmp_path / "0").exists()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells")
def test_the_state_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert process_state(child.pid) == "there"
        child.send_signal(signal.SIGSTOP)
        while process_state(child.pid) == "there":
            time.sleep(0.01)
        assert process_state(child.pid) == "stopped"
        child.kill()
        child.wait()
        assert process_state(child.pid) == "gone"
