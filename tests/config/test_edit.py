"""Values changed in a run file: what was asked for is there, and nothing else moved."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from koushi.config.edit import edited, write_edited
from koushi.config.load import load_config
from koushi.config.source import plain, read
from koushi.config.write import value_text
from koushi.errors import ConfigError, WrongTarget

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def changes(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[0] in "+-"]


def reread(folder: Path, text: str) -> object:
    path = folder / "reread.yaml"
    path.write_text(text, encoding="utf-8")
    return {key: plain(entry) for key, entry in read(path).branch.items()}


def test_a_value_is_replaced_and_its_comment_keeps_its_column() -> None:
    text = "model: {name: llama3-debug}\ntraining:\n  seq_len: 256   # tokens\n  steps: 5\n"
    assert edited(text, {"training.seq_len": 8192}) == text.replace("256   #", "8192  #")
    assert edited(text, {"training.seq_len": 8192192}) == text.replace("256   #", "8192192 #")
    assert edited(text, {"model.name": "llama3-8b"}) == text.replace("llama3-debug", "llama3-8b")


def test_a_new_key_goes_to_the_end_of_its_section_before_what_follows() -> None:
    text = "training:\n    seq_len: 256  # tokens\n\n# About the rate.\noptimizer:\n    lr: 1e-3\n"
    after = edited(text, {"training.recompute": "full", "optimizer.beta1": 0.8})
    assert changes(text, after) == ["+     recompute: full", "+     beta1: 0.8"]
    assert after.splitlines()[2] == "    recompute: full"
    assert after.splitlines()[-1] == "    beta1: 0.8"


def test_a_new_section_goes_to_the_end_of_the_file() -> None:
    for text in ("training: {steps: 5}\n", "training: {steps: 5}"):
        after = edited(text, {"precision.compute": "bfloat16", "precision.reduce": "float32"})
        assert after == "training: {steps: 5}\n\nprecision:\n  compute: bfloat16\n  reduce: float32\n"


def test_sections_in_braces_take_new_keys(tmp_path: Path) -> None:
    assert edited("training: {steps: 5}  # few\n", {"training.seed": 3}) == "training: {steps: 5, seed: 3}  # few\n"
    assert edited("training: {}\n", {"training.seed": 3}) == "training: {seed: 3}\n"
    assert edited("{training: {steps: 5}}\n", {"run.device": "cpu"}) == "{training: {steps: 5}, run: {device: cpu}}\n"
    spread = "training: {\n  steps: 5,\n}\n"
    assert reread(tmp_path, edited(spread, {"training.seed": 3})) == {"training": {"steps": 5, "seed": 3}}


def test_empty_sections_and_values_are_filled() -> None:
    assert edited("training:\nrun: {device: cpu}\n", {"training.seed": 3}) == (
        "training: {seed: 3}\nrun: {device: cpu}\n"
    )
    assert edited("run:\n  folder:   # none\n", {"run.folder": "x"}) == "run:\n  folder: x   # none\n"


def test_lists_and_what_is_nested_last(tmp_path: Path) -> None:
    text = "model:\n  rope_scaling:\n    factor: 8.0\n# parallel\nparallelism:\n  tensor_parallel_degree: 2\n"
    layers = {"parallelism.pipeline_parallel_layers_per_stage": (1, 2), "model.dim": 64}
    assert changes(text, edited(text, layers)) == ["+   dim: 64", "+   pipeline_parallel_layers_per_stage: [1, 2]"]
    block = "parallelism:\n  pipeline_parallel_layers_per_stage:\n    - 1\n    - 2  # last\n  world_size: 4\n"
    after = edited(block, {"parallelism.pipeline_parallel_layers_per_stage": None})
    assert reread(tmp_path, after) == {"parallelism": {"pipeline_parallel_layers_per_stage": None, "world_size": 4}}


def test_none_for_a_key_that_is_not_there_changes_nothing() -> None:
    text = "training: {steps: 5}\n"
    assert edited(text, {"parallelism.world_size": None, "training.seed": None}) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1F1B", "1F1B"),
        ("full", "full"),
        ("true", '"true"'),
        ("12", '"12"'),
        ("a: b", '"a: b"'),
        ("", '""'),
        (True, "true"),
        (None, "null"),
        ((1, 2), "[1, 2]"),
    ],
)
def test_values_read_as_they_were_meant(tmp_path: Path, value: object, text: str) -> None:
    assert value_text(value) == text
    assert reread(tmp_path, f"key: {text}\n") == {"key": value}


def test_a_file_is_written_whole_with_the_mode_of_the_old(tmp_path: Path) -> None:
    for example in EXAMPLES:
        target = tmp_path / example.name
        write_edited(example, target, {"parallelism.tensor_parallel_degree": 4, "training.recompute": "selective"})
        before, after = example.read_text(encoding="utf-8"), target.read_text(encoding="utf-8")
        assert len(changes(before, after)) <= 4, example  # a value that was not there is one line, else there are two
        assert load_config(target).parallelism.tensor_parallel_degree == 4
        os.chmod(target, 0o640)
        write_edited(target, target, {"training.recompute": "none"})
        assert load_config(target).training.recompute == "none"
        assert target.stat().st_mode & 0o777 == 0o640
    assert len(EXAMPLES) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in EXAMPLES]


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("model: {name: llama3-8b}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other.yaml: is there already; a new name, or .*debug.yaml itself"):
        write_edited(ROOT / "examples" / "debug.yaml", other, {"training.steps": 1})
    assert other.read_text(encoding="utf-8") == "model: {name: llama3-8b}\n"
    with pytest.raises(WrongTarget, match="there is no folder"):
        write_edited(other, tmp_path / "nowhere" / "x.yaml", {"training.steps": 1})


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("training: {steps: 5}\n", encoding="utf-8")
    link.symlink_to(real)
    write_edited(link, link, {"training.steps": 7})
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == "training: {steps: 7}\n"


def test_a_section_that_an_alias_shares_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = "validation: &same {every: 2}\ncheckpoint: *same\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"anchor|changed one by one"):
        write_edited(path, path, {"validation.every": 4})
    assert path.read_text(encoding="utf-8") == text
    assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("parallelism: {\n  tensor_parallel_degree: 2  # c\n}\n", "parallelism.world_size: is in a section in braces"),
        ("parallelism: &p\n  tensor_parallel_degree: 2\n", "parallelism.world_size: .*anchor"),
        ("training: {steps: &n 8}\nparallelism:\n  world_size: *n # c\n", "parallelism.world_size: .*alias"),
        ("parallelism:\n  world_size: &n 8\ntraining: {steps: *n}\n", "parallelism.world_size: .*anchor"),
        ("parallelism:\n  world_size:\n  - 1 # c1\n  - 2 # c2\n", "parallelism.world_size: "),
    ],
)
def test_what_cannot_be_changed_alone_is_left_to_hands(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{what}.*; write world_size: 4 there by hand"):
        write_edited(path, path, {"parallelism.world_size": 4})
    assert path.read_text(encoding="utf-8") == text
    assert [one.name for one in tmp_path.iterdir()] == ["run.yaml"]


def test_all_that_is_left_to_hands_is_named_and_what_is_so_already_is_not(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "parallelism: &p {tensor_parallel_degree: 2}\ntraining: {steps: &n 8, microbatch_size: *n, seed: 1}\n"
    )
    values: dict[str, object] = {
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.pipeline_parallel_layers_per_stage": None,
        "parallelism.world_size": 4,
        "parallelism.pipeline_parallel_degree": 2,
        "training.seed": 2,
        "training.microbatch_size": 1,
        "training.steps": 8,
    }
    with pytest.raises(ConfigError) as raised:
        write_edited(path, path, values)
    assert [(one.key, one.legal) for one in raised.value.problems] == [
        ("parallelism.world_size", "write world_size: 4 there by hand"),
        ("parallelism.pipeline_parallel_degree", "write pipeline_parallel_degree: 2 there by hand"),
        ("training.microbatch_size", "write microbatch_size: 1 there by hand"),
    ]
    write_edited(
        path, path, {key: value for key, value in values.items() if key in ("training.seed", "training.steps")}
    )
    assert "seed: 2" in path.read_text() and "steps: &n 8" in path.read_text()


def test_line_ends_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"training:\r\n  steps: 5\r\n")
    write_edited(path, path, {"training.seed": 3, "precision.compute": "bfloat16"})
    assert path.read_bytes() == (b"training:\r\n  steps: 5\r\n  seed: 3\r\n\r\nprecision:\r\n  compute: bfloat16\r\n")


def test_relative_paths_lead_to_the_same_from_another_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "run.yaml", tmp_path / "there" / "run.yaml"
    target.parent.mkdir()
    (tmp_path / "mine.yaml").touch()
    source.write_text(
        "run: {hardware: mine.yaml}\ndata: {path: x/*.txt, tokenizer: embedded}\nmodel: {hf: /a}\n", encoding="utf-8"
    )
    write_edited(source, target, {})
    assert target.read_text(encoding="utf-8") == (
        "run: {hardware: ../mine.yaml}\ndata: {path: ../x/*.txt, tokenizer: embedded}\nmodel: {hf: /a}\n"
    )


@pytest.mark.parametrize("column", [28, 4])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_comment_of_several_lines_stays_whole(column: int, newline: str) -> None:
    """Behind the last key of a section, which a new one follows."""
    more = f"{'':<{column}}# the second line of it"
    lines = ["model:", "  rope_scaling:", f"    {'factor: 8.0':<24}# one line,", more, "  # hf: models/mine"]
    lines += ["parallelism:", f"  {'world_size: 64':<26}# one line,", more, more]
    for ending in ([], ["", "# About the rate.", "optimizer: {}"]):
        text = newline.join([*lines, *ending]) + (newline if ending else "")
        after = edited(text, {"parallelism.tensor_parallel_degree": 2, "model.dim": 64})
        inner = ["  dim: 64"]
        rest = ["  tensor_parallel_degree: 2"]
        assert after.splitlines() == [*lines[:4], *inner, *lines[4:], *rest, *ending]
