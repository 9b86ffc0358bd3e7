"""Under torchrun, on one node and on two: restarts, and what a stuck collective tells."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tiny import TINY

from koushi.check.check import check
from koushi.checkpoint.folders import published
from koushi.config.load import load
from koushi.train.launch import launch
from koushi.train.resume import RunPlace
from koushi.train.trainer import train_rank

PATIENCE = 240
STEPS = 100
"""So many that the first kill comes long before the last, on any machine."""
RUN = TINY.replace("steps: 3", f"steps: {STEPS}") + "checkpoint: {every: 2}\n"


def run_file(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN, encoding="utf-8")
    return path


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), "a step is told twice"
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = check(load(run_file(folder), ["--dp-shard", "2"]))

    def worker(job: object) -> None:
        train_rank(check(load(folder / "run.yaml", ["--dp-shard", "2"])), place=RunPlace(folder))

    launch(worker, job)
    return losses(folder)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def torchrun(
    folder: Path, nodes: int, processes: int, *arguments: str, restarts: int = 2
) -> Iterator[list[subprocess.Popen[str]]]:
    """``nodes`` agents on this machine, each with ``processes`` ranks of one training in ``folder``."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
        f"--max-restarts={restarts}",
    ]
    if nodes == 1:
        command.append("--standalone")
    else:
        command += [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        command += ["--rdzv-id=koushi-test", "--local-addr=127.0.0.1"]
    command += ["-m", "koushi", "train", str(run_file(folder)), *arguments]
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
        for _ in range(nodes)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            for child in children(agent):
                child.kill()
            agent.kill()
            agent.wait()
            assert agent.stdout is not None, "it was asked for"
            agent.stdout.close()


def children(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(agent.pid).children()
    except psutil.NoSuchProcess:
        return []


def await_true(agents: list[subprocess.Popen[str]], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"in {PATIENCE} s not: {what}"
        for agent in agents:
            assert agent.poll() is None, f"ended before {what}: {agent.communicate()[0]}"
        time.sleep(0.02)


def rows_written(folder: Path) -> int:
    path = folder / "runs" / "run" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def outputs(agents: list[subprocess.Popen[str]]) -> list[str]:
    return [agent.communicate(timeout=PATIENCE)[0] for agent in agents]


def kill_a_rank(agents: list[subprocess.Popen[str]], folder: Path) -> None:
    """Kill rank 1 after some steps, and wait for its successor: of several agents not the one with rank 0."""
    await_true(agents, lambda: rows_written(folder) > 5, "some steps")
    ranks = ((agent, child) for agent in agents for child in children(agent))
    theirs, victim = next((agent, child) for agent, child in ranks if child.environ()["RANK"] == "1")
    victim.kill()
    await_true(agents, lambda: victim.pid not in {child.pid for child in children(theirs)}, "its end")
    await_true(agents, lambda: len(children(theirs)) > 0, "a restart")


@pytest.mark.long
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    with torchrun(tmp_path, 1, 2, "--dp-shard", "2") as agents:
        kill_a_rank(agents, tmp_path)
        (said,) = outputs(agents)
    assert agents[0].returncode == 0, said
    assert re.search(rf"resuming from \S+: step \d+ of {STEPS}, ", said), said
    assert losses(tmp_path / "runs" / "run") == undisturbed


@pytest.mark.long
def test_a_run_on_two_nodes_survives_a_killed_rank_and_goes_on_after_both_were_killed(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """The agent of the other node, whose rank 0 finds the folder, counts no restart. Told to begin anew, the ranks
    still go on with what they began."""
    with torchrun(tmp_path, 2, 1, "--dp-shard", "2", "run.resume=never") as agents:
        kill_a_rank(agents, tmp_path)
        before = rows_written(tmp_path)
        await_true(agents, lambda: rows_written(tmp_path) != before, "a step after the restart")
    assert published(tmp_path / "runs" / "run" / "checkpoints")
    assert len(losses(tmp_path / "runs" / "run")) < STEPS, "nothing is left to go on with"
    with torchrun(tmp_path, 2, 1, "--dp-shard", "2") as agents:
        said = outputs(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert any("resuming from" in text for text in said), said
    assert losses(tmp_path / "runs" / "run") == undisturbed


@pytest.mark.long
def test_ranks_of_other_nodes_are_told_through_the_store(tmp_path: Path) -> None:
    """Two ranks a node: the one beside the stopped rank tells the other node what that was in."""
    arguments = (
        "--dp-replicate",
        "2",
        "--dp-shard",
        "2",
        "run.timeout=8",
        "training.steps=100000",
        "checkpoint.every=0",
    )
    with torchrun(tmp_path, 2, 2, *arguments, restarts=0) as agents:
        await_true(agents, lambda: rows_written(tmp_path) > 3, "some steps")
        stopped = children(agents[1])[0]
        stopped.send_signal(signal.SIGSTOP)
        text, _ = agents[0].communicate(timeout=PATIENCE)
    rank = re.search(r"rank (\d) \(dp_replicate=\d dp_shard=0\) has [^;]*; its process is stopped", text)
    assert rank is not None, text
