"""Saving and loading against torch's own ``dcp.save`` and ``dcp.load`` of the same state, side by side.

    python benchmarks/checkpoint.py --ranks 2 --dim 768 --layers 12

Every rank holds its shard of parameters and both moments, as FSDP cuts them. Both ways write into the same folder in
turn and both reach the disk: ours fsyncs every file; for torch ``sync_files`` is on, as by default. ``stall`` is how
long a step waits: for ours in async mode, for torch with ``dcp.async_save``. Ours also takes checksums, and
verifies them when it loads. The best of the rounds counts.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from koushi.checkpoint import dcp as ours
from koushi.checkpoint.folders import step_folder
from koushi.checkpoint.manifest import Head, read_manifest
from koushi.checkpoint.save import Saver
from koushi.checkpoint.state import Piece, owned
from koushi.checkpoint.tensors import CheckpointFiles
from koushi.config.schema import Checkpoint, JobConfig, Model, Parallelism, Run
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import llama_size
from koushi.optim.adamw import AdamW, Moments
from koushi.parallel.compose import build
from koushi.parallel.device_mesh import build_mesh
from koushi.train.launch import launch

HEAD = Head(1, 0, 1, 0, "", {}, {}, torch.__version__, "")


def make_job(ranks: int, dim: int, layers: int) -> Job:
    model = Model(dim=dim, n_layers=layers, n_heads=dim // 64, n_kv_heads=dim // 64, ffn_dim=4 * dim)
    config = JobConfig(
        model=model, parallelism=Parallelism(data_parallel_shard_degree=ranks), run=Run(device="cpu", timeout=600)
    )
    return Job(config, llama_size(model), MeshSpec.of(dp_shard=ranks), (range(layers),), "benchmark", Path())


def timed(action: Callable[[], object]) -> float:
    """Seconds until every rank has done ``action``."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def resident() -> int:
    """Peak bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(job: Job, *, folder: Path, rounds: int) -> None:
    """Worker: every way ``rounds`` times, in turn; rank 0 prints."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    mesh = build_mesh(job.mesh, "cpu")
    model = build(job, mesh, torch.device("cpu"))
    optimizer = AdamW(job.config.optimizer)
    optimizer.steps = 1
    for one in model.parameters:
        if one.value.numel():
            optimizer.moments[one.name] = Moments(torch.rand_like(one.value), torch.rand_like(one.value))
    pieces = owned(model.parameters, optimizer, job.mesh.coordinate(dist.get_rank()))
    plain = {  # the same tensors as torch's planner wants them
        f"{kind}/{one.name}": one.tensor if kind == "parameter" else distributed(one.tensor, moment)
        for one in model.parameters
        if one.name in optimizer.moments
        for kind, moment in (
            ("parameter", one.value),
            ("exp_avg", optimizer.moments[one.name].exp_avg),
            ("exp_avg_sq", optimizer.moments[one.name].exp_avg_sq),
        )
    }
    total = torch.tensor(sum(piece.tensor.nbytes for piece in pieces))
    dist.all_reduce(total)
    found: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    saver = Saver(folder / "async", Checkpoint(every=1, keep_last=1), group)

    def note(name: str, action: Callable[[], object]) -> None:
        before = resident()
        found.setdefault(name, []).append(timed(action))
        memory[name] = max(memory.get(name, 0), resident() - before)

    for step in range(1, rounds + 1):
        torch_folder, our_folder = folder / f"torch-{step}", step_folder(folder / "ours", step)
        note("koushi save", partial(ours.save, our_folder, HEAD, pieces, group))
        note("torch save", partial(dcp.save, plain, checkpoint_id=torch_folder, process_group=group))
        note("koushi load", partial(load, our_folder, pieces, group))
        note("torch load", partial(dcp.load, plain, checkpoint_id=torch_folder, process_group=group))
        head = Head(**{**HEAD.__dict__, "step": step})
        note("koushi stall", partial(saver.save, head, pieces))
        saver.wait()
        note("torch stall", partial(begin, plain, folder / f"torch-async-{step}", group))
        PENDING.pop().result()
        dist.barrier()
        if dist.get_rank() == 0:
            for path in folder.iterdir():
                shutil.rmtree(path)
        dist.barrier()
    if dist.get_rank() == 0:
        print_table(int(total), found, memory)
    dist.destroy_process_group()


PENDING: list[object] = []


def begin(plain: dict[str, object], folder: Path, group: dist.ProcessGroup) -> None:
    PENDING.append(dcp.async_save(plain, checkpoint_id=folder, process_group=group))


def distributed(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A moment as a DTensor, placed as its parameter is."""
    if not isinstance(like, torch.distributed.tensor.DTensor):
        return local
    return torch.distributed.tensor.DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def load(folder: Path, pieces: Sequence[Piece], group: dist.ProcessGroup) -> None:
    with CheckpointFiles(folder, read_manifest(folder)) as files:
        ours.load(files, pieces, group)


def print_table(total: int, found: dict[str, list[float]], memory: dict[str, int]) -> None:
    print(f"{total / 1e6:.0f} MB in all; best of {len(found['koushi save'])}; MB/s of all ranks, and their ratio")
    print(f"{'':<8}{'koushi':>12}{'torch':>12}{'koushi is':>14}{'peak memory added on rank 0':>34}")
    for what in ("save", "load", "stall"):
        mine, theirs = min(found[f"koushi {what}"]), min(found[f"torch {what}"])
        shown = (f"{mine * 1e3:.0f} ms", f"{theirs * 1e3:.0f} ms")
        if what != "stall":
            shown = (f"{total / mine / 1e6:.0f} MB/s", f"{total / theirs / 1e6:.0f} MB/s")
        added = f"{memory[f'koushi {what}'] / 1e6:.0f} / {memory[f'torch {what}'] / 1e6:.0f} MB"
        print(f"{what:<8}{shown[0]:>12}{shown[1]:>12}{theirs / mine:>8.2f} x as fast{added:>30}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; empty: the system's temporary folder")
    options = parser.parse_args()
    job = make_job(options.ranks, options.dim, options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        launch(partial(measure, folder=Path(folder), rounds=options.rounds), job)


if __name__ == "__main__":
    sys.exit(main())
