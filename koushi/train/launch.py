"""Starting one process per rank on this machine, or joining those that torchrun started.

Local processes are forked on CPU after torch is imported once, so that a rank costs milliseconds
and a few megabytes, and spawned on CUDA, which a forked process cannot use. Fork comes before this
process does any parallel work of its own: OpenMP's threads do not survive it, so start the lattice first.

No rank connects to anything before the last has been forked (``await_all``): a connection wakes the store's
thread in this process, and a rank forked while that thread holds one of the C library's locks (it looks up
the name of whoever connects) has the lock for ever.
"""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import ProcessExitedException

from koushi.errors import RankFailure, RunRefused, Stopped, TrainingError
from koushi.job import Job
from koushi.parallel.arrivals import ARRIVALS
from koushi.parallel.device_mesh import resolve_device
from koushi.signals import heard
from koushi.train.failures import (
    failure_text,
    lost_peer,
    read_reports,
    report,
    restart_reason,
    stuck_report,
    write_first_end,
    write_report,
)
from koushi.train.forking import SIGNALS, as_forked, await_all, forks
from koushi.train.inquiry import end_processes, inquest, inquire, timed_out
from koushi.train.open_files import out_of_files, raise_limit
from koushi.train.stopping import sleep_unless_requested

Worker = Callable[[Job], None]

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
GRACE = 5
"""Seconds between asking a process to end and killing it, and for which a rank that lost a peer stays
alive, so that the parent sees the peer's end first."""
POLL = 0.05
KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
NONE = "none"
"""The signals that elastic is to handle itself: its handler raises whatever else is being handled."""
_parallel_here = threading.Event()
"""Set once a worker has run in this process: with its OpenMP pool lost by fork, a rank that wanted several
threads would wait for ever."""


def launch(worker: Worker, job: Job, max_restarts: int = 0) -> None:
    """Run ``worker(job)`` once per rank of ``job.mesh`` and return when all have returned.

    When a rank fails, all are ended and started again, ``max_restarts`` times at most; under torchrun that is
    torchrun's to do.

    The worker finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. It runs
    in this process under torchrun and for a world of 1. On CUDA it must be picklable.

    Raises TrainingError for a world that cannot be started, RankFailure for a rank that failed, Stopped
    for a signal; what a worker in this process raises comes through. No process outlives the call.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join_world(worker, job)
    elif job.mesh.world_size == 1 and not max_restarts:
        _run_alone(worker, job)
    else:
        _start_world(worker, job, max_restarts)


def _join_world(worker: Worker, job: Job) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if started != job.mesh.world_size:
        raise RunRefused(
            f"{started} processes were started (WORLD_SIZE) but the mesh {job.mesh} has {job.mesh.world_size} ranks; "
            f"start {job.mesh.world_size}, or choose degrees whose product is {started}"
        )
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    record(_run_joined)(worker, job)


def _run_joined(worker: Worker, job: Job) -> None:
    """A rank under torchrun, which shows the traceback with our note."""
    rank = int(os.environ["RANK"])
    try:
        worker(job)
    except Exception as error:
        error.add_note(f"on rank {rank} ({job.mesh.describe(rank)})")
        finding = inquire(job.mesh) if timed_out(error) else None
        if finding is not None:
            error.add_note(f"{finding.headline}\n{finding.details}")
        elif lost_peer(error):
            sleep_unless_requested(GRACE)
        raise


def _run_alone(worker: Worker, job: Job) -> None:
    raise_limit(1)
    _parallel_here.set()
    with ExitStack() as stack:
        stack.enter_context(_environment(_local_variables()))
        store = _store()
        stack.enter_context(_environment(_lone_rank(store.port)))
        try:
            worker(job)
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT, "SIGINT") from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _lone_rank(port: int) -> dict[str, str]:
    """What elastic would tell the only rank."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _start_world(worker: Worker, job: Job, max_restarts: int) -> None:
    """The first signal is passed on to the ranks by elastic; one from the keyboard that follows kills them."""
    others = set(multiprocessing.active_children())

    def first(number: signal.Signals) -> None:
        raise SignalException(number.name, sigval=number)

    def again(number: signal.Signals) -> None:
        if number in KEYBOARD:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()

    try:
        with heard(SIGNALS, first, again):
            _run_world(worker, job, max_restarts)
    except SignalException as error:
        raise Stopped(error.sigval, error.sigval.name) from None
    except OSError as error:
        raise TrainingError(f"cannot start {job.mesh.world_size} ranks: {_in_words(error)}") from error


def _in_words(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"{error}; temporary files go to {tempfile.gettempdir()} (TMPDIR)"
    return out_of_files(error) or str(error)


def _run_world(worker: Worker, job: Job, max_restarts: int) -> None:
    world = job.mesh.world_size
    device = resolve_device(job.config.run.device)
    if device == "cuda" and world > torch.cuda.device_count():
        raise TrainingError(
            f"the mesh {job.mesh} has {world} ranks but this machine has {torch.cuda.device_count()} CUDA devices; "
            f"use torchrun on more machines, smaller degrees, or run.device: cpu"
        )
    raise_limit(world)
    threads = torch.get_num_threads()
    per_rank = threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // world)
    if _parallel_here.is_set():
        per_rank = 1
    variables = _local_variables() | {
        "OMP_NUM_THREADS": str(per_rank),
        "OMP_WAIT_POLICY": "passive",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": NONE,
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="koushi-")))
        stack.enter_context(_environment(variables))
        store = _store()
        stack.enter_context(_elastic_quiet(folder))
        stack.enter_context(_no_orphans())
        stack.enter_context(forks())
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        config = _launch_config(job, store.port, "spawn" if device == "cuda" else "fork", max_restarts)
        try:
            elastic_launch(config, _rank_main)(worker, job, folder, per_rank, os.getpid())
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            text = failure_text(job.mesh, read_reports(folder / str(max_restarts)), rank, failure.exitcode)
            raise RankFailure(text + _why_aborted(job, folder / f"book-{max_restarts}", failure.exitcode)) from None


def _why_aborted(job: Job, books: Path, code: int) -> str:
    """What the ranks were in where native code ended one: gloo does so on a message of the wrong size, NCCL's
    watchdog when a collective takes too long, and neither raises anything in Python."""
    finding = inquest(job.mesh, books) if code == -signal.SIGABRT else None
    return f"\n{finding.headline}\n{finding.details}" if finding is not None else ""


def _launch_config(job: Job, port: int, start_method: str, max_restarts: int) -> LaunchConfig:
    saves = job.config.checkpoint.every > 0
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.mesh.world_size,
        run_id="koushi",
        role="rank",
        rdzv_backend="static",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        rdzv_configs={"rank": 0},
        local_addr=LOOPBACK,
        max_restarts=max_restarts,
        monitor_interval=POLL,
        start_method=start_method,
        signals_to_handle=NONE,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=math.ceil(job.config.run.grace) if saves else GRACE,
    )


def _rank_main(worker: Worker, job: Job, folder: Path, threads: int, parent: int) -> None:
    """The whole life of a local rank."""
    as_forked(parent)
    torch.set_num_threads(threads)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    try:
        await_all(folder / f"started-{attempt}", int(os.environ["RANK"]), job.mesh.world_size)
    except OSError as error:
        print(f"rank {os.environ['RANK']} cannot start: {_in_words(error)}", file=sys.stderr)
        os._exit(1)
    os.environ[ARRIVALS] = str(folder / f"book-{attempt}")
    if attempt and os.environ["RANK"] == "0":
        print(f"restart {attempt}: {restart_reason(job.mesh, folder, attempt - 1)}", file=sys.stderr)
    try:
        worker(job)
    except BaseException as error:
        rank = int(os.environ["RANK"])
        finding = inquire(job.mesh) if timed_out(error) else None
        account = report(rank, error) if finding is None else stuck_report(rank, finding)
        write_report(folder / str(attempt), account)
        if finding is not None:
            end_processes(finding)
        elif account.consequence:
            sleep_unless_requested(GRACE)
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors of a broken process group may wait for peers for ever.
        os._exit(1)


def _store() -> TCPStore:
    """The rendezvous of local ranks, reachable from this machine only, on a port that is already ours.

    A socket of our own, because the store's would listen on every interface and look up the name of every
    rank that connects, one after the other. Elastic's store for the same port shares this one's server.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(minutes=5),
        master_listen_fd=listener.detach(),
    )


def _local_variables() -> dict[str, str]:
    """For gloo and its store on one machine, where the user has not chosen otherwise.

    Connections are made when first used, over loopback. The store's client asks DNS for the name of
    127.0.0.1, which must not hold up a machine without a network.
    """
    wanted = {
        "TORCH_GLOO_LAZY_INIT": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _no_orphans() -> Iterator[None]:
    """Kill what is left of the processes started inside, whatever interrupted elastic's own clean-up."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        left = set(multiprocessing.active_children()) - before
        for process in left:
            process.kill()
        for process in left:
            process.join()


def _worth_showing(entry: logging.LogRecord, folder: Path) -> bool:
    """Not what elastic says of the process whose end it has noticed, which it tells nobody else before it starts the
    world again: that is left in ``folder``, and a failed rank reaches the user as a RankFailure."""
    ended = entry.exc_info[1] if entry.exc_info else None
    if isinstance(ended, ProcessExitedException):
        write_first_end(folder, ended.error_index, ended.exit_code)
        return False
    return entry.levelno >= logging.ERROR


@contextmanager
def _elastic_quiet(folder: Path) -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.addFilter(partial(_worth_showing, folder=folder))
    loggers = [logging.getLogger("torch.distributed.elastic"), logging.getLogger("torch.multiprocessing.spawn")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of the store's thread, which the forked ranks never touch.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
