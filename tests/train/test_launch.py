"""Every rank starts, and none is left behind, however the run ends."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path

import launch_cases as cases
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE, await_true, gone

from koushi.errors import RankFailure, Stopped, TrainingError
from koushi.job import Job
from koushi.parallel.device_mesh import resolve_device
from koushi.train import launch as launching
from koushi.train.launch import launch

CASES = Path(cases.__file__)


_strike: list[tuple[int, signal.Signals]] = []
"""After how many forks this process is to get a signal while Python still runs what belongs to the fork."""


def _strike_at_fork() -> None:
    if _strike:
        left, number = _strike.pop()
        if left == 1:
            os.kill(os.getpid(), number)
        else:
            _strike.append((left - 1, number))


os.register_at_fork(after_in_parent=_strike_at_fork)


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    yield
    left = [child for child in psutil.Process().children(recursive=True) if "resource_tracker" not in str(child)]
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == [], "processes outlived the launch"


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Also where nohup runs these tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def failure(worker: Callable[[Job], None], job: Job) -> str:
    with pytest.raises(RankFailure) as caught:
        launch(worker, job)
    assert caught.value.exit_code == 1
    return str(caught.value)


def test_every_rank_reaches_its_groups_and_the_environment_is_restored(tmp_path: Path) -> None:
    job = cases.make_job(tmp_path, pp=2, dp_shard=2, tp=2)
    before, handlers, threads = dict(os.environ), signal.getsignal(signal.SIGINT), torch.get_num_threads()
    launch(cases.reduce_on_every_dim, job)
    for rank in range(8):
        expected = " ".join(f"{name}={sum(job.mesh.group(rank, name))}" for name in job.mesh.names)
        assert (tmp_path / f"sums-{rank}").read_text() == expected
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGINT) is handlers
    assert torch.get_num_threads() == threads


def test_output_of_every_rank_reaches_the_terminal_and_nothing_else_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(cases.say_hello, cases.make_job(tmp_path, tp=3))
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == [f"out of {rank}" for rank in range(3)]
    assert sorted(output.err.splitlines()) == [f"err of {rank}" for rank in range(3)]


def test_a_world_of_one_runs_in_this_process(tmp_path: Path) -> None:
    seen = []

    def worker(job: Job) -> None:
        cases.reduce_on_every_dim(job)
        seen.append((os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()))

    launch(worker, cases.make_job(tmp_path))
    assert seen == [(os.getpid(), "0", "1", torch.get_num_threads())]
    assert "RANK" not in os.environ


def test_a_world_of_one_lets_errors_through_and_cleans_up(tmp_path: Path) -> None:
    def worker(job: Job) -> None:
        dist.init_process_group("gloo")
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        launch(worker, cases.make_job(tmp_path))
    assert not dist.is_initialized()


def test_ctrl_c_in_a_world_of_one_is_no_traceback(tmp_path: Path) -> None:
    def worker(job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Stopped) as caught:
        launch(worker, cases.make_job(tmp_path))
    assert (str(caught.value), caught.value.exit_code) == ("stopped by SIGINT", 130)


def test_ranks_are_reachable_from_this_machine_only(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def worker(job: Job) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        sockets = psutil.Process().net_connections(kind="tcp")
        seen.extend(each.laddr for each in sockets if each.status == psutil.CONN_LISTEN)
        assert int(os.environ["MASTER_PORT"]) in {port for _, port in seen}

    launch(worker, cases.make_job(tmp_path))
    assert {address for address, _ in seen} == {"127.0.0.1"}


def test_ranks_forked_after_parallel_work_here_do_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    launch(cases.compute_in_parallel, cases.make_job(tmp_path))
    launch(cases.compute_in_parallel, cases.make_job(tmp_path, tp=2))
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in range(2)] == ["1 True", "1 True"]


def test_ranks_do_not_collect_the_garbage_of_this_process(tmp_path: Path) -> None:
    """A rank that ended a process group it inherited would crash or hang: its threads are not there."""

    def leave_a_group_in_a_circle(job: Job) -> None:
        cases.connect()
        circle: list[object] = [dist.group.WORLD]
        circle.append(circle)

    gc.disable()
    try:
        launch(leave_a_group_in_a_circle, cases.make_job(tmp_path))
        launch(cases.collect_garbage, cases.make_job(tmp_path, tp=2))
    finally:
        gc.enable()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("failures", [0, 1])
def test_no_rank_works_before_the_last_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Else a fork could copy a lock that the store's thread holds while it greets a rank, which hung the new one."""
    forked: list[float] = []
    start = ForkProcess.start

    def slow_start(process: ForkProcess) -> None:
        forked.append(time.monotonic())
        time.sleep(0.2)
        start(process)

    monkeypatch.setattr(ForkProcess, "start", slow_start)
    launch(partial(cases.tell_the_time, failures=failures), cases.make_job(tmp_path, tp=4), max_restarts=failures)
    for attempt in range(failures + 1):
        began = [float((tmp_path / f"began-{attempt}-{rank}").read_text()) for rank in range(4)]
        assert min(began) > forked[4 * attempt + 3] + 0.2
    assert len(forked) == 4 * (failures + 1)


@pytest.mark.parametrize("forks", [1, 3, 4])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_that_comes_with_a_fork_is_not_lost(tmp_path: Path, forks: int, number: signal.Signals) -> None:
    _strike.append((forks, number))
    with pytest.raises(Stopped) as caught:
        launch(cases.hang, cases.make_job(tmp_path, tp=4))
    assert (str(caught.value), caught.value.exit_code) == (f"stopped by {number.name}", 128 + number)


def test_no_room_for_temporary_files_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(launching, "elastic_launch", lambda config, worker: no_room)
    with pytest.raises(TrainingError, match=r"cannot start 2 ranks: .*No space left on device.* \(TMPDIR\)$"):
        launch(cases.hang, cases.make_job(tmp_path, tp=2))


def test_an_exception_is_shown_with_rank_coordinate_and_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = failure(cases.raise_on_rank_2, cases.make_job(tmp_path, dp_shard=2, tp=2))
    lines = text.splitlines()
    assert lines[0] == "rank 2 (dp_shard=1 tp=0) failed: ValueError: the loss is a teapot"
    assert lines[1] == "Traceback (most recent call last):"
    assert "in raise_on_rank_2" in lines[2]
    assert text.count("Traceback") == 1
    assert capfd.readouterr().err == ""


def test_an_error_of_ours_is_shown_without_traceback(tmp_path: Path) -> None:
    text = failure(cases.mend_on_rank_1, cases.make_job(tmp_path, pp=2, tp=2))
    assert text.splitlines()[0] == "rank 1 (pp=0 tp=1) failed: the loss is not finite at step 3"
    assert "Traceback" not in text


def test_a_killed_rank_is_named_before_those_that_lost_it(tmp_path: Path) -> None:
    text = failure(cases.kill_rank_1, cases.make_job(tmp_path, dp_shard=4))
    assert text.splitlines()[0].startswith("rank 1 (dp_shard=1) died by SIGKILL (")
    assert "closed by peer" not in text


def test_a_rank_that_exits_is_named_with_its_code(tmp_path: Path) -> None:
    text = failure(cases.exit_on_rank_3, cases.make_job(tmp_path, dp_shard=4))
    assert text.splitlines()[0] == "rank 3 (dp_shard=3) failed: SystemExit: 3"
    assert "in exit_on_rank_3" in text


def test_a_rank_that_exits_in_native_code_is_named_with_its_code(tmp_path: Path) -> None:
    text = failure(cases.vanish_on_rank_3, cases.make_job(tmp_path, dp_shard=4))
    assert text.splitlines()[0] == "rank 3 (dp_shard=3) exited with code 7 without an exception"


@pytest.mark.parametrize(
    ("number", "to_the_group", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)],
)
def test_a_signal_ends_every_rank(tmp_path: Path, number: signal.Signals, to_the_group: bool, code: int) -> None:
    with hanging_run(tmp_path) as run:
        ranks = pids(run, tmp_path, 4)
        if to_the_group:
            os.killpg(run.pid, number)
        else:
            os.kill(run.pid, number)
        _, errors = run.communicate(timeout=PATIENCE)
        assert run.returncode == code, errors
        assert errors == f"stopped by {number.name}\n"
        assert all(gone(rank) for rank in ranks)


def test_a_run_under_nohup_does_not_hear_its_terminal_close(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch(cases.hang_up, cases.make_job(tmp_path, tp=2))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert {(tmp_path / f"after-{rank}").read_text() for rank in range(2)} == {"still there"}


@pytest.mark.long
def test_a_signal_at_any_moment_of_an_end_does_no_harm(tmp_path: Path) -> None:
    """Each of these runs has a second signal from the keyboard some Python lines after the first."""
    command = [sys.executable, str(CASES.with_name("strike.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ends = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert len(ends) > 5, "too few moments were tried"
    for lines, code, errors in ends:
        assert int(code) in (128 + signal.SIGINT, -signal.SIGINT), (lines, errors)
        assert errors in ("stopped by SIGINT", ""), (lines, code)


def test_ranks_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    with hanging_run(tmp_path) as run:
        ranks = pids(run, tmp_path, 4)
        if sys.platform == "linux":
            os.kill(ranks[1], signal.SIGSTOP)
        run.kill()
        run.wait(PATIENCE)
        await_true(lambda: all(gone(rank) for rank in ranks), "every rank gone")


def hanging_run(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(CASES), "hang", "4", str(folder)]
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)


def pids(run: subprocess.Popen[str], folder: Path, ranks: int) -> list[int]:
    """The process ids of all ranks, once all are connected."""
    files = [folder / f"pid-{rank}" for rank in range(ranks)]
    await_true(lambda: run.poll() is not None or all(file.exists() for file in files), "every rank started")
    assert run.poll() is None, run.communicate()[1]
    return [int(file.read_text()) for file in files]


def test_a_wrong_world_under_torchrun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match=r"2 processes were started .* has 8 ranks; start 8"):
        launch(cases.say_hello, cases.make_job(tmp_path, dp_shard=4, tp=2))


def torchrun(worker: str, processes: int, ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*command, str(CASES), worker, str(ranks), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_under_torchrun_the_worker_runs_in_torchruns_processes(tmp_path: Path) -> None:
    done = torchrun("reduce_on_every_dim", 2, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"sums-{rank}").read_text().split()[2] for rank in range(2)] == ["dp_shard=1", "dp_shard=1"]


@pytest.mark.long
def test_under_torchrun_the_first_failure_is_the_root_cause(tmp_path: Path) -> None:
    done = torchrun("raise_on_rank_2", 4, 4, tmp_path)
    assert done.returncode != 0
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert "ValueError: the loss is a teapot" in root
    assert "on rank 2 (dp_shard=2)" in root


def test_a_job_can_be_sent_to_spawned_ranks(tmp_path: Path) -> None:
    job = cases.make_job(tmp_path, pp=2, tp=2)
    assert pickle.loads(pickle.dumps(job)) == job


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_refused(tmp_path: Path) -> None:
    job = cases.make_job(tmp_path)
    assert resolve_device(job.config.run.device) == "cpu"
    config = job.config.model_copy(update={"run": job.config.run.model_copy(update={"device": "cuda"})})
    with pytest.raises(TrainingError, match="no CUDA device"):
        resolve_device(config.run.device)
