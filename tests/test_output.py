"""Files that commands write: whole or not at all, and never over something else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from koushi.errors import KoushiError, WrongTarget
from koushi.output import PAGE, check_target, write_new, write_text


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_a_page_is_new_or_takes_the_place_of_a_page(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    write_text(path, "one\r\n", PAGE)
    os.chmod(path, 0o640)
    write_text(path, "two\r\n", PAGE)
    assert path.read_bytes() == b"two\r\n"
    assert path.stat().st_mode & 0o777 == 0o640
    link = tmp_path / "link.html"
    link.symlink_to(path)
    write_text(link, "three", PAGE)
    assert link.is_symlink() and path.read_text() == "three"
    assert names(tmp_path) == ["a.html", "link.html"]


def test_a_new_file_has_the_mode_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "a.html", "one", PAGE)
    assert (tmp_path / "a.html").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_wrong_targets_are_told_and_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("mine")
    other = tmp_path / "metrics.jsonl"
    other.write_text("{}")
    page = tmp_path / "run.html"
    page.symlink_to(run)
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (other, "is there already and is not a page; name a new file"),
        (page, "is what this command reads"),
        (tmp_path, "is a folder; name a file in it, such as .*page.html"),
        (tmp_path / "no" / "x.html", "there is no folder .*no; make it"),
        (run / "x.html", "is not a folder"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(WrongTarget, match=words) as caught:
            write_text(path, "text", PAGE, run)
        assert caught.value.exit_code == 2
        assert "\n" not in str(caught.value)
    assert run.read_text() == "mine"
    assert names(tmp_path) == ["metrics.jsonl", "pipe", "run.html", "run.yaml"]


def test_what_is_read_only_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "a.html"
    page.write_text("old")
    # A superuser may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != page)
    with pytest.raises(WrongTarget, match=r"a.html is read-only; name another"):
        check_target(page, PAGE)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(WrongTarget, match=r"the folder .* is read-only"):
        check_target(page, PAGE)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    page = tmp_path / "a.html"
    page.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: write_text(page, "new", PAGE), lambda: write_new(tmp_path / "b.yaml", "new", "run.yaml")):
        with pytest.raises(KoushiError, match="No space left on device; make room") as caught:
            write()
        assert caught.value.exit_code == 1
    assert page.read_text() == "old"
    assert names(tmp_path) == ["a.html"]


def test_a_new_file_never_replaces_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    write_new(path, "one", "run.yaml")
    with pytest.raises(FileExistsError):
        write_new(path, "two", "run.yaml")
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # as if it came to be just now
    with pytest.raises(FileExistsError):
        write_new(path, "two", "run.yaml")
    assert path.read_text() == "one"
    assert names(tmp_path) == ["run.yaml"]
