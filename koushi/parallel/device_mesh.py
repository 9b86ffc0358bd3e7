"""The torch DeviceMesh, built from a MeshSpec, and the start of a process's part in it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from koushi.errors import RunRefused, TrainingError
from koushi.mesh import MeshSpec
from koushi.parallel.arrivals import START, name_groups, open_book


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of every technique; the mesh is theirs."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def spec(self) -> MeshSpec:
        return MeshSpec.of(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, tp=self.tp)

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    @classmethod
    def of(cls, spec: MeshSpec) -> ParallelDims:
        return cls(*(spec.degree(name) for name in ("pp", "dp_replicate", "dp_shard", "tp")))

    def build_mesh(self, device_type: str) -> DeviceMesh:
        return build_mesh(self.spec, device_type)


def build_mesh(spec: MeshSpec, device_type: str, timeout: float | None = None) -> DeviceMesh:
    """One DeviceMesh of the whole world, every dim of ``spec`` in it, also those of degree 1.

    ``timeout`` is how many seconds a collective on any of its groups may take; the world's own does not count there.

    Raises RunRefused when the started world is not the mesh's: torch would take a larger one silently.
    """
    started = dist.get_world_size()
    if started != spec.world_size:
        raise RunRefused(
            f"the mesh {spec} needs {spec.world_size} processes, but {started} were started; "
            f"start {spec.world_size}, or change the degrees"
        )
    if timeout is not None:
        _await_all(device_type, timeout)
    world_mesh = init_device_mesh(device_type, spec.shape, mesh_dim_names=spec.names)
    if timeout is not None:
        for group in world_mesh.get_all_groups():
            group.set_timeout(timedelta(seconds=timeout))
    name_groups({name: world_mesh.get_group(name) for name in spec.names if spec.degree(name) > 1})
    return world_mesh


def _await_all(device_type: str, timeout: float) -> None:
    """Return once every rank is here; a collective, whose wait ends and tells which rank is not, where torch waits half
    an hour in silence for one that does not come to make a group.

    The wait is told its limit: gloo's own, for a connection that the other rank is to make, is five times the group's.
    """
    work = dist.all_reduce(torch.zeros(1, device=device_type), async_op=True)
    work.wait(timedelta(seconds=timeout))


def destroy_mesh(world_mesh: DeviceMesh) -> None:
    """Leave the groups of every dim, whose threads and connections would else stay; the world itself remains."""
    for group in world_mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def local_device(device_type: str) -> torch.device:
    """This process's own device."""
    if device_type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """What torch calls the part; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def resolve_device(choice: str) -> str:
    """``auto`` is cuda where there is a GPU, else cpu; raises TrainingError for cuda without one."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise TrainingError("run.device is cuda, but torch sees no CUDA device here; use run.device=cpu")
    if choice == "auto":
        return "cuda" if available else "cpu"
    return choice


def agents_store(timeout: float) -> dist.TCPStore | None:
    """The store of the launcher's agents, which outlives the ranks of a start; None where no launcher has one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def init_process_group(device: torch.device, timeout: float) -> None:
    """Join the world that the launcher's environment variables describe.

    Raises TrainingError where not all its ranks come within ``timeout`` seconds.
    """
    if device.type == "cuda":
        let_segments_grow()
        torch.cuda.set_device(device)
    backend, patience = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: dist.Store | None = agents_store(timeout)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if store is not None:
        # It still holds the addresses of the ranks of the starts before.
        if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
            start = agree_on_start(store, rank, world, timeout)
        store = dist.PrefixStore(f"start-{start}", store)
    os.environ[START] = start
    if world > 1:
        open_book(rank)
    if store is None:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)


def let_segments_grow() -> None:
    """Have torch's CUDA allocator grow its segments, which leaves less memory unused; what the user has set stays.

    It reads the variable as CUDA is first used.
    """
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def agree_on_start(store: dist.Store, rank: int, world: int, timeout: float) -> str:
    """A name that the ranks of this start share, and that none before had. For several nodes, whose agents count
    restarts each on its own.

    Rank 0 makes the name. Another rank asks under a name of its own, so that it takes no answer to a rank before it;
    rank 0 answers until it is heard, so that it takes no rank before for one that is there. Raises TrainingError on
    rank 0 where one has not asked in ``timeout`` seconds, DistStoreError on one that rank 0 has not answered.
    """
    mine = uuid4().hex
    if rank > 0:
        store.set(f"asked/{rank}", mine)
        name = store.get(f"answer/{mine}").decode()
        store.set(f"heard/{mine}/{name}", "")
        return name
    missing, end = set(range(1, world)), time.monotonic() + timeout
    while missing:
        for other in sorted(missing):
            if not store.check([f"asked/{other}"]):
                continue
            asked = store.get(f"asked/{other}").decode()
            store.set(f"answer/{asked}", mine)
            if store.check([f"heard/{asked}/{mine}"]):
                missing.remove(other)
        if missing and time.monotonic() > end:
            first = ", ".join(str(one) for one in sorted(missing)[:8]) + (", ..." if len(missing) > 8 else "")
            raise TrainingError(
                f"after {timeout:.0f} s (run.timeout) {len(missing)} of {world} ranks have not joined: {first}; see "
                "whether their node has started, and reaches this one"
            )
        time.sleep(0.02 if missing else 0)
    return mine
