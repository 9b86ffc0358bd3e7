"""A resolved run file is read back as the same config, whatever strings it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koushi.config.load import load, load_config
from koushi.config.schema import Data, JobConfig, Model, Optimizer, Parallelism, RopeScaling
from koushi.config.source import plain, read
from koushi.config.write import WIDEST, resolved_text, value_text, write_resolved

CONFIG = JobConfig(
    model=Model(rope_scaling=RopeScaling(factor=3.5)),
    parallelism=Parallelism(pipeline_parallel_layers_per_stage=(1, 2, 3)),
    optimizer=Optimizer(lr=3e-7),
    data=Data(path="a folder/*.jsonl"),
)


def test_every_key_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    write_resolved(CONFIG, path)
    assert load_config(path) == CONFIG
    assert "  lr: 3e-07\n" in path.read_text(encoding="utf-8")
    assert "  pipeline_parallel_layers_per_stage: [1, 2, 3]\n" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    ["", " ", "null", "~", "true", "no", "1", "1e3", "0x1f", ".inf", "a: b", "a #b", "- a", "*a", "&a", "!x", "{", "%",
     "2026-01-01", "1:30", "=", "<<", "\n", "\t", "\x00", "\x7f", "\x85", "\u2028", "\ufeff", "日本 語", "🙂", '"', "'",
     "C:\\x", "a\\nb"],
)  # fmt: skip
def test_odd_strings_come_back(text: str, tmp_path: Path) -> None:
    assert_comes_back(text, tmp_path)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_string_comes_back(tmp_path: Path, text: str) -> None:
    assert_comes_back(text, tmp_path)


def assert_comes_back(text: str, folder: Path) -> None:
    path = folder / "resolved.yaml"
    path.write_text(f"run:\n  folder: {value_text(text)}\n  device: cpu\n", encoding="utf-8")
    tree = read(path)
    assert not tree.found
    assert plain(tree.branch["run"]) == {"folder": text, "device": "cpu"}


def test_plain_strings_stay_plain() -> None:
    assert [value_text(one) for one in ("1F1B", "llama3-8b", "corpus/*.jsonl", "a b")] == [
        "1F1B", "llama3-8b", "corpus/*.jsonl", '"a b"',
    ]  # fmt: skip
    assert [value_text(one) for one in (None, True, 2, 2.0, (1, 2))] == ["null", "true", "2", "2.0", "[1, 2]"]


def test_notes_are_comments_in_one_column(tmp_path: Path) -> None:
    notes = {"training.steps": "here", "optimizer.lr": "two\nlines \x1b[1m", "data.path": "x"}
    path = tmp_path / "noted.yaml"
    long = CONFIG.model_copy(update={"data": Data(path="a " * WIDEST)})
    path.write_text(resolved_text(long, notes), encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines()
    noted = [line for line in lines if "  # " in line]
    assert [line.partition("  # ")[2] for line in noted] == ["here", "two lines ?[1m", "x"]
    assert noted[0].index("#") == noted[1].index("#") < noted[2].index("#")
    assert load(path).config == long
