"""metrics.jsonl of a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path

from koushi.train.metrics import forget_after


def test_rows_after_the_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": 1.0, "elapsed_seconds": step / 2} for step in range(1, 6)]
    rows.insert(3, {"step": 3, "validation_loss": 2.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo', encoding="utf-8")
    assert forget_after(path, 3) == 1.5
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:4]
    assert forget_after(path, 0) == 0
    assert path.read_text() == ""
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_has_nothing_to_forget(tmp_path: Path) -> None:
    assert forget_after(tmp_path / "metrics.jsonl", 5) == 0
    assert list(tmp_path.iterdir()) == []
