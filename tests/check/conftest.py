"""Checking a run file that a test writes as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.config.load import load
from koushi.errors import ConfigError, Problem
from koushi.job import Job


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., Job]:
    """``checked(text, *overrides, world=None)``: the job, or a ConfigError."""

    def run(text: str, *overrides: str, world: int | None = None) -> Job:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return check(load(path, overrides), world)

    return run


@pytest.fixture
def problems(checked: Callable[..., Job], tmp_path: Path) -> Callable[..., tuple[Problem, ...]]:
    """As ``checked``, but the problems, their places without the folder; none where the job is legal."""

    def run(text: str, *overrides: str, world: int | None = None) -> tuple[Problem, ...]:
        try:
            checked(text, *overrides, world=world)
        except ConfigError as error:
            folder = f"{tmp_path}/"
            return tuple(
                Problem(one.where.replace(folder, ""), one.key, one.what.replace(folder, ""), one.legal)
                for one in error.problems
            )
        return ()

    return run


@pytest.fixture
def neighbours(tmp_path: Path) -> None:
    """Files that the run files of the table name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "even.bin").write_bytes(b"1234")
    (tmp_path / "broken.json").write_text("{")
    added = [{"id": 200_000, "content": "<|end_of_text|>"}]
    (tmp_path / "large.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": added}))
