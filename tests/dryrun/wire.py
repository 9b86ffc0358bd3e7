"""What the kernel says that gloo's sockets have sent in a step, against what the dry run says would travel."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from koushi.data.batches import open_samples, train_batch
from koushi.job import Job
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import build
from koushi.parallel.device_mesh import build_mesh, destroy_mesh, init_process_group
from koushi.parallel.ledger import Event
from koushi.train.launch import launch
from koushi.train.step import TrainStep

HEADER = 48
"""Bytes that gloo's TCP transport puts before every message and every notice that one may come."""
BYTES_ACKED = 120
"""Where struct tcp_info has the count of bytes that the other end has acknowledged, 8 of them."""
QUIET = 0.3
"""Seconds without news after which a step's last bytes have been acknowledged."""


def payload(event: Event) -> float:
    """What a rank sends for it on gloo, one rank with another."""
    sent = event.collective.wire_bytes(len(event.ranks))
    if event.collective.operation == "reduce_scatter" and event.collective.submesh == "dp_shard":
        return 2 * sent  # gloo carries a reduce-scatter out as an all-reduce; tp's own are all-to-alls
    return sent


def sent(jobs: Sequence[Job], folder: Path) -> list[int]:
    """Bytes that all ranks together send in the second step of each job, headers among them."""
    launch(partial(_worker, jobs=tuple(jobs), folder=folder), jobs[0])
    ranks = range(jobs[0].mesh.world_size)
    return [
        sum(json.loads((folder / f"sent-{index}-{rank}").read_text()) for rank in ranks) for index in range(len(jobs))
    ]


def _worker(job: Job, *, jobs: Sequence[Job], folder: Path) -> None:
    device = torch.device("cpu")
    init_process_group(device, job.config.run.timeout)
    rank = dist.get_rank()
    for index, one in enumerate(jobs):
        mesh = build_mesh(one.mesh, "cpu")
        step = TrainStep(one, build(one, mesh, device), AdamW(one.config.optimizer))
        data_index = one.mesh.index(rank, "dp_replicate", "dp_shard")
        batch = train_batch(open_samples(one), 0, one.local_batch_size, data_index)
        step.run(*batch)  # connects
        _meet(folder, f"before-{index}", one.mesh.world_size)
        before = _quiet()
        _meet(folder, f"counted-{index}", one.mesh.world_size)
        step.run(*batch)
        _meet(folder, f"after-{index}", one.mesh.world_size)
        (folder / f"sent-{index}-{rank}").write_text(json.dumps(_quiet() - before))
        _meet(folder, f"done-{index}", one.mesh.world_size)
        destroy_mesh(mesh)
    dist.destroy_process_group()


def _meet(folder: Path, name: str, world: int) -> None:
    """Wait for all ranks without a socket."""
    (folder / f"{name}-{dist.get_rank()}").touch()
    while not all((folder / f"{name}-{rank}").exists() for rank in range(world)):
        time.sleep(0.01)


def _quiet() -> int:
    """The count once it stands still."""
    count, since = _acknowledged(), time.monotonic()
    while time.monotonic() - since < QUIET:
        time.sleep(0.02)
        now = _acknowledged()
        if now != count:
            count, since = now, time.monotonic()
    return count


def _acknowledged() -> int:
    """Of all of this process's TCP connections."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry)))
        except FileNotFoundError:
            continue  # the listing's own
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                information = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
                total += struct.unpack_from("<Q", information, BYTES_ACKED)[0]
    return total
