"""Which failure counts as the first, and how it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from koushi.errors import TrainingError
from koushi.mesh import MeshSpec
from koushi.train.failures import (
    Report,
    exit_text,
    failure_text,
    lost_peer,
    read_reports,
    report,
    restart_reason,
    write_first_end,
    write_report,
)

MESH = MeshSpec.of(pp=2, tp=2)


def account(rank: int, time: float, headline: str = "", consequence: bool = False) -> Report:
    return Report(rank, time, headline or f"error of {rank}", "", consequence)


def first_line(*reports: Report, noticed: int, code: int = 1) -> str:
    return failure_text(MESH, reports, noticed, code).splitlines()[0]


def test_the_earliest_cause_is_first_whoever_was_noticed() -> None:
    reports = account(0, 1.0, consequence=True), account(3, 2.0), account(1, 3.0)
    assert failure_text(MESH, reports, 1, 1).splitlines() == [
        "rank 3 (pp=1 tp=1) failed: error of 3",
        "2 other ranks failed after it",
    ]


def test_a_death_without_report_comes_before_its_consequences() -> None:
    line = first_line(account(0, 1.0, consequence=True), noticed=2, code=-9)
    assert line == "rank 2 (pp=1 tp=0) died by SIGKILL (killed from outside, or by the system for want of memory)"


def test_a_cause_comes_before_a_death_without_report() -> None:
    assert first_line(account(1, 1.0), noticed=2, code=-6) == "rank 1 (pp=0 tp=1) failed: error of 1"


def test_among_consequences_only_the_earliest_is_shown() -> None:
    reports = account(0, 1.0, consequence=True), account(1, 2.0, consequence=True)
    assert failure_text(MESH, reports, 1, 1).splitlines() == [
        "rank 0 (pp=0 tp=0) failed: error of 0",
        "1 other rank failed after it",
    ]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exited with code 3 without an exception"),
        (-11, "died by SIGSEGV (a crash in native code)"),
        (-10, "died by SIGUSR1"),
        (-200, "died by signal 200"),
    ],
)
def test_exit_codes_in_words(code: int, text: str) -> None:
    assert exit_text(code) == text


def test_a_restart_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    write_first_end(tmp_path, 2, -9)
    write_report(tmp_path / "0", account(0, 1.0, "connection closed by peer", consequence=True))
    killed = "rank 2 (pp=1 tp=0) died by SIGKILL (killed from outside, or by the system for want of memory)"
    assert restart_reason(MESH, tmp_path, 0) == killed
    write_first_end(tmp_path, 3, 1)
    write_report(tmp_path / "1", account(3, 2.0, "no such file\nand more"))
    assert restart_reason(MESH, tmp_path, 1) == "rank 3 (pp=1 tp=1) failed: no such file"
    assert restart_reason(MESH, tmp_path, 2) == "no rank was seen to end"


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as found:
        return found


def test_a_lost_peer_is_seen_through_what_was_raised_from_it() -> None:
    lost = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4242")
    wrapped = ValueError("could not finish the step")
    wrapped.__cause__ = lost
    assert lost_peer(lost)
    assert lost_peer(wrapped)
    assert not lost_peer(RuntimeError("shapes differ"))


def test_reports_survive_the_way_through_the_folder(tmp_path: Path) -> None:
    written = [report(1, caught(ValueError("no"))), report(0, caught(TrainingError("not finite")))]
    for each in written:
        write_report(tmp_path, each)
    (tmp_path / "2.draft").write_text("{")
    assert read_reports(tmp_path) == written
    assert (written[0].headline, written[0].details) == ("ValueError: no", "ValueError: no")
    assert (written[1].headline, written[1].details) == ("not finite", "")


def test_the_traceback_begins_in_the_worker_with_its_causes_and_notes() -> None:
    def worker() -> None:
        try:
            {}["key"]
        except KeyError as error:
            error.add_note("a note")
            raise ValueError from error

    try:
        worker()
    except ValueError as error:
        account = report(0, error)
    assert account.headline == "ValueError"
    assert account.details.count("in worker") == 2
    assert "a note" in account.details
    assert "test_the_traceback_begins" not in account.details.split("direct cause")[1].split("in worker")[0]


@pytest.mark.parametrize("gone", [True, False])
def test_an_output_that_nobody_reads_needs_no_traceback(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koushi.train.failures.reader_gone", lambda: gone)
    found = report(0, BrokenPipeError(32, "Broken pipe"))
    assert (found.headline == "nothing reads the run's output any more") is gone
    assert (found.details == "") is gone
    assert not found.consequence
