"""Workers for test_launch.py, and a command that launches one of them as ``koushi train`` would.

``python launch_cases.py WORKER RANKS FOLDER``: every rank leaves its process id in FOLDER.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from koushi.config.schema import JobConfig, Run
from koushi.errors import KoushiError, TrainingError
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import llama_size
from koushi.train.launch import launch


def make_job(base: Path, **degrees: int) -> Job:
    config = JobConfig(run=Run(device="cpu"))
    return Job(config, llama_size(config.model), MeshSpec.of(**degrees), (range(6),), "t", base)


def rank_here() -> int:
    return int(os.environ["RANK"])


def leave(job: Job, name: str, text: str) -> None:
    """Leave ``text`` in the job's folder for the test to read, whole or not at all."""
    draft = job.base / f"draft-{rank_here()}"
    draft.write_text(text)
    draft.rename(job.base / f"{name}-{rank_here()}")


def tell_the_time(job: Job, failures: int) -> None:
    """Leave when this rank's work began, and fail in the first ``failures`` starts."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    leave(job, f"began-{attempt}", str(time.monotonic()))
    if attempt < failures:
        raise TrainingError("as asked")


def reduce_on_every_dim(job: Job) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", job.mesh.shape, mesh_dim_names=job.mesh.names)
    sums = []
    for name in job.mesh.names:
        total = torch.tensor([float(rank_here())])
        dist.all_reduce(total, group=mesh.get_group(name))
        sums.append(f"{name}={total.item():.0f}")
    leave(job, "sums", " ".join(sums))
    dist.destroy_process_group()


def wait_for_peers() -> None:
    """Block in native code until a peer that never comes has come."""
    dist.all_reduce(torch.ones(1))


def connect() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))


def raise_on_rank_2(job: Job) -> None:
    connect()
    if rank_here() == 2:
        raise ValueError("the loss is a teapot")
    wait_for_peers()


def mend_on_rank_1(job: Job) -> None:
    connect()
    if rank_here() == 1:
        raise TrainingError("the loss is not finite at step 3")
    wait_for_peers()


def kill_rank_1(job: Job) -> None:
    connect()
    if rank_here() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_peers()


def exit_on_rank_3(job: Job) -> None:
    connect()
    if rank_here() == 3:
        sys.exit(3)
    wait_for_peers()


def vanish_on_rank_3(job: Job) -> None:
    connect()
    if rank_here() == 3:
        os._exit(7)
    wait_for_peers()


def say_hello(job: Job) -> None:
    print(f"out of {rank_here()}", flush=True)
    print(f"err of {rank_here()}", file=sys.stderr, flush=True)


def compute_in_parallel(job: Job) -> None:
    """Work that torch gives to several threads where it has them."""
    matrix = torch.randn(600, 600)
    leave(job, "threads", f"{torch.get_num_threads()} {bool((matrix @ matrix).exp().isfinite().any())}")


def collect_garbage(job: Job) -> None:
    gc.collect()


def hang_up(job: Job) -> None:
    for process in (os.getppid(), os.getpid()):
        os.kill(process, signal.SIGHUP)
    leave(job, "after", "still there")


def hang(job: Job) -> None:
    """Rank 0 sleeps in Python, the others in native code, none of them for less than minutes."""
    connect()
    leave(job, "pid", str(os.getpid()))
    if rank_here() == 0:
        time.sleep(600)
    wait_for_peers()


def main() -> None:
    name, ranks, folder = sys.argv[1:]
    try:
        launch(globals()[name], make_job(Path(folder), dp_shard=int(ranks)))
    except KoushiError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
