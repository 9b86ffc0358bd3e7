"""Single values: what is wrong, what would be legal, and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from koushi.config.load import RunFile, load, load_config
from koushi.config.schema import JobConfig
from koushi.config.spelling import ABSENT, ELSEWHERE, ELSEWHERE_IN, VALUES, absent, nearest, nearest_key
from koushi.config.validate import legal_keys, schema_at
from koushi.errors import ConfigError

COUNT = "an integer of at least 1 is needed"
CHOICES = "GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"


def loaded(folder: Path, text: str) -> RunFile:
    path = folder / "run.yaml"
    path.write_text(text)
    return load(path)


def marked(text: str) -> tuple[str, str]:
    """The text without its § and the line:column where that stood."""
    before = text[: text.index("§")]
    return text.replace("§", ""), f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("training:\n  steps: §eight", "training.steps", f"is 'eight', a string; {COUNT}"),
        ("training: {steps: §'10'}", "training.steps", f"is '10', a string; {COUNT}, without quotes"),
        ("training: {steps: §true}", "training.steps", f"is true, a truth value; {COUNT}"),
        ("training: {steps: §1e3}", "training.steps", f"is 1000.0, a number; {COUNT}, such as 1000"),
        ("training: {steps: §1.5}", "training.steps", f"is 1.5, a number; {COUNT}"),
        ("training: {steps: §0}", "training.steps", f"is 0, an integer; {COUNT}"),
        ("training: {steps: §-3}", "training.steps", f"is -3, an integer; {COUNT}"),
        ("training: {steps:§ }", "training.steps", f"is empty; {COUNT}"),
        ("training: {steps: §[1, 2]}", "training.steps", f"is a list of 2; {COUNT}"),
        ("training: {steps: §{a: 1}}", "training.steps", f"is a section; {COUNT}"),
        (
            "training: {steps: §0xffffffffffffffffff}",
            "training.steps",
            "is 4722366482869645213695, too large; at most 9223372036854775807",
        ),
        (
            "parallelism: {data_parallel_shard_degree: §auto}",
            "parallelism.data_parallel_shard_degree",
            "is 'auto', a string; an integer of at least 1, or -1 for what is left of the world, is needed",
        ),
        ("training: {seed: §-1}", "training.seed", "is -1, an integer; an integer of at least 0 is needed"),
        ("training: {compile: §1}", "training.compile", "is 1, an integer; true or false is needed"),
        ("training: {compile: §no}", "training.compile", "is 'no', a string; true or false is needed"),
        ("optimizer: {lr: §.nan}", "optimizer.lr", "is nan; a finite number above 0 is needed"),
        ("optimizer: {lr: §.inf}", "optimizer.lr", "is inf; a finite number above 0 is needed"),
        ("optimizer: {lr: §-.inf}", "optimizer.lr", "is -inf; a finite number above 0 is needed"),
        ("optimizer: {lr: §-1e-3}", "optimizer.lr", "is -0.001, a number; a finite number above 0 is needed"),
        ("optimizer: {lr: §true}", "optimizer.lr", "is true, a truth value; a finite number above 0 is needed"),
        (
            "optimizer: {lr: §'3e-4'}",
            "optimizer.lr",
            "is '3e-4', a string; a finite number above 0 is needed, without quotes",
        ),
        (
            "optimizer: {beta1: §1}",
            "optimizer.beta1",
            "is 1, an integer; a finite number of at least 0 and below 1 is needed",
        ),
        (
            "lr_schedule: {min_lr_ratio: §1.5}",
            "lr_schedule.min_lr_ratio",
            "is 1.5, a number; a finite number from 0 to 1 is needed",
        ),
        ("data: {text_key: §5}", "data.text_key", "is 5, an integer; a string is needed"),
        ("data: {path: §[a]}", "data.path", "is a list of 1; a string is needed"),
        ("optimizer: {name: §adamw}", "optimizer.name", "is 'adamw'; did you mean AdamW? The choices are AdamW"),
        (
            "precision: {compute: §bf16}",
            "precision.compute",
            "is 'bf16'; did you mean bfloat16? The choices are float32, bfloat16, float64",
        ),
        (
            "precision: {compute: §16}",
            "precision.compute",
            "is 16, an integer; the choices are float32, bfloat16, float64",
        ),
        (
            "parallelism: {pipeline_parallel_schedule: §interleaved_1f1b}",
            "parallelism.pipeline_parallel_schedule",
            f"is 'interleaved_1f1b'; did you mean Interleaved1F1B? The choices are {CHOICES}",
        ),
        (
            "parallelism: {pipeline_parallel_schedule: §qqq}",
            "parallelism.pipeline_parallel_schedule",
            f"is 'qqq'; the choices are {CHOICES}",
        ),
        (
            "parallelism: {pipeline_parallel_layers_per_stage: [1, §-2]}",
            "parallelism.pipeline_parallel_layers_per_stage[1]",
            "is -2, an integer; an integer of at least 0 is needed",
        ),
        (
            "parallelism: {pipeline_parallel_layers_per_stage: §4}",
            "parallelism.pipeline_parallel_layers_per_stage",
            "is 4, an integer; a list, each item an integer of at least 0, is needed",
        ),
        ("training: §5", "training", "is 5, an integer; a section of keys is needed"),
        ("training: §[1]", "training", "is a list of 1; a section of keys is needed"),
        ("training: §''", "training", "is '', a string; a section of keys is needed"),
        ("model: {rope_scaling: §8}", "model.rope_scaling", "is 8, an integer; a section of keys is needed"),
        (
            "model:\n  rope_scaling:\n    factor: §0\n",
            "model.rope_scaling.factor",
            "is 0, an integer; a finite number above 0 is needed",
        ),
        (
            "model: {rope_scaling: {§facter: 8}}",
            "model.rope_scaling.facter",
            "is not a key of model.rope_scaling; did you mean model.rope_scaling.factor?",
        ),
        ("training: {§stepz: 3}", "training.stepz", "is not a key of training; did you mean training.steps?"),
        ("training: {§lr: 3}", "training.lr", "is not a key of training; did you mean optimizer.lr?"),
        (
            "training: {§learning_rate: 3}",
            "training.learning_rate",
            "is not a key of training; did you mean optimizer.lr?",
        ),
        ("training: {§max_steps: 3}", "training.max_steps", "is not a key of training; did you mean training.steps?"),
        (
            "parallelism:\n  pipeline_parallel_degree: 1\n  §tp: 3",
            "parallelism.tp",
            "is not a key of parallelism; did you mean parallelism.tensor_parallel_degree?",
        ),
        ("§tp: 3", "tp", "is not a key of a run file; did you mean parallelism.tensor_parallel_degree?"),
        (
            "§tensor_parallel_size: 3",
            "tensor_parallel_size",
            "is not a key of a run file; did you mean parallelism.tensor_parallel_degree?",
        ),
        (
            "training: {§local_batch_size: 3}",
            "training.local_batch_size",
            "is not a key of training; did you mean training.microbatch_size?",
        ),
        (
            "checkpoint: {§interval: 3}",
            "checkpoint.interval",
            "is not a key of checkpoint; did you mean checkpoint.every?",
        ),
        (
            "checkpoint: {§async_mode: async}",
            "checkpoint.async_mode",
            "is not a key of checkpoint; did you mean checkpoint.mode?",
        ),
        (
            "checkpoint: {§enable_checkpoint: true}",
            "checkpoint.enable_checkpoint",
            "is not a key of checkpoint; checkpoint.every alone says: the steps between checkpoints, 0 for none",
        ),
        (
            "optimizer: {§implementation: fused}",
            "optimizer.implementation",
            "is not a key of optimizer; AdamW is always torch's fused kernel",
        ),
        (
            "§job: {dump_folder: x, description: y}",
            "job",
            "is not a section of a run file; a run has its run file's name, and run.folder is where it writes",
        ),
        ("§training.steps: 3", "training.steps", "is not a key of a run file; write it as a key steps under training:"),
        ("§modle:\ntraining: {steps: 3}", "modle", "is not a key of a run file; did you mean model?"),
        ("§trainning: {steps: 3}", "trainning", "is not a section of a run file; did you mean training?"),
        (
            "metrics: {§zzz: 3}",
            "metrics.zzz",
            "is not a key of metrics; the keys are every, tensorboard",
        ),
    ],
)
def test_a_wrong_value_is_told_with_its_place(tmp_path: Path, text: str, key: str, message: str) -> None:
    text, place = marked(text)
    found = loaded(tmp_path, text).found
    assert [str(one.problem) for one in found] == [f"{tmp_path}/run.yaml:{place}: {key}: {message}"]


INTEGERS = [key for key in legal_keys() if schema_at(tuple(key.split("."))).get("type") == "integer"]


@pytest.mark.parametrize("key", INTEGERS)
def test_an_integer_that_no_file_holds_is_too_large_to_the_digit(key: str, tmp_path: Path) -> None:
    for value, what in (
        ("9223372036854775808", "is 9223372036854775808, too large; at most 9223372036854775807"),
        ("123456789012345678901234567890", "is 123456789012345678901234567890, too large; at most 9223372036854775807"),
        ("1e30", "is 1e+30, too large; at most 9223372036854775807"),
    ):
        text = value
        for name in reversed(key.split(".")):
            text = f"{{{name}: {text}}}"
        found = loaded(tmp_path, text).found
        assert [str(one.problem).partition(": ")[2] for one in found] == [f"{key}: {what}"]


def test_a_large_integer_is_a_number_where_one_is_needed(tmp_path: Path) -> None:
    run_file = loaded(tmp_path, "optimizer: {lr: 10000000000000000000000}")
    assert run_file.found == () and run_file.config.optimizer.lr == 1e22


def test_a_file_of_mistakes_tells_them_all(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        "trainning: {steps: ten}\n"
        "optimizer: {lr: .nan, beta1: -1, name: adamw}\n"
        "precision: 5\n"
        "data: {sorce: text, path: 3}\n"
        "metrics: {every: 0, every: 1}\n"
        "nothing_like_it: 1\n",
    ).found
    assert sorted(one.key for one in found) == [
        "data.path",
        "data.sorce",
        "metrics.every",
        "nothing_like_it",
        "optimizer.beta1",
        "optimizer.lr",
        "optimizer.name",
        "precision",
        "training.steps",
        "trainning",
    ]


def test_empty_sections_are_defaults(tmp_path: Path) -> None:
    text = "".join(f"{section}:\n" for section in JobConfig.model_fields)
    run_file = loaded(tmp_path, text)
    assert run_file.found == ()
    assert run_file.config == JobConfig()


def test_what_is_wrong_stays_at_its_default_and_is_known_to_be(tmp_path: Path) -> None:
    text = "training: {steps: x, seq_len: 64, max_seq_len: 3}\noptimizer: 3\nparallelism: {tp: 2}\n"
    run_file = loaded(tmp_path, text)
    assert run_file.config.training.steps == JobConfig().training.steps
    assert run_file.config.training.seq_len == 64
    assert not run_file.is_sound("training.steps")
    assert run_file.is_sound("training.seq_len")
    assert not run_file.is_sound("optimizer.lr")
    assert not run_file.is_sound("parallelism.tensor_parallel_degree")


def test_places_prefer_the_command_line_then_the_first(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {dim: 64}\ntraining:\n  steps: 3\n  seq_len: 4\n")
    run_file = load(path, ["training.seed=3"])
    keys = ("training.steps", "training.seq_len")
    assert run_file.place(*keys) == ("training.steps", run_file.places["training.steps"])
    assert run_file.place(*keys, "training.seed")[1].text == "command line (training.seed=3)"
    assert run_file.place("training.compile")[1].text == f"{path}:2:1"
    assert run_file.place("run.folder")[1].text == f"{path}:1:1"


def test_an_unreadable_file_and_wrong_overrides_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "no.yaml", ["training.steps=x", "--tp"])
    assert [one.where.removeprefix(str(tmp_path)) for one in raised.value.problems] == [
        "/no.yaml:1:1",
        "command line (training.steps=x)",
        "command line (--tp)",
    ]


def test_load_config_raises_for_single_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {steps: 3}\n")
    assert load_config(path).training.steps == 3
    with pytest.raises(ConfigError, match=r"training\.steps"):
        load_config(path, ["training.steps=x"])


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    assert set(ELSEWHERE.values()) <= set(legal_keys())
    for name, key in ELSEWHERE.items():
        assert nearest_key(name, legal_keys()) in legal_keys(), name
        assert nearest_key(f"zzz.{name}", legal_keys()) == key
    for name, key in ELSEWHERE_IN.items():
        assert nearest_key(name, legal_keys()) == key


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_there_is_said_of_no_key_that_is(name: str, tmp_path: Path) -> None:
    assert not {name, f"training.{name}"} & set(legal_keys())
    assert absent((name if "." in name else f"training.{name}").upper().replace("_", "-")) == ABSENT[name]
    for key in re.findall(r"\b[a-z_]+\.[a-z_]+\b", ABSENT[name]):
        assert key in legal_keys() or key == "metrics.jsonl"
    section, _, key = name.rpartition(".")
    (found,) = loaded(tmp_path, f"{section}: {{{key}: 1}}" if section else f"{name}: {{a: 1}}").found
    assert found.legal == ABSENT[name]


def test_a_toml_file_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 10\n")
    with pytest.raises(ConfigError, match=r"run\.toml:1:1: is TOML, and a run file is YAML; .* `training: \{"):
        load(path)


def test_values_of_other_tools_are_values_of_the_schema() -> None:
    choices = {
        choice
        for section in JobConfig.model_json_schema()["$defs"].values()
        for schema in section["properties"].values()
        for choice in (*schema.get("enum", ()), schema.get("const", ""))
    }
    assert set(VALUES.values()) <= choices


@pytest.mark.parametrize(
    ("word", "legal", "meant"),
    [
        ("1f1b", ["GPipe", "1F1B"], "1F1B"),
        ("g-pipe", ["GPipe", "1F1B"], "GPipe"),
        ("llama3_8b", ["llama3-8b", "llama3-70b"], "llama3-8b"),
        ("qqq", ["GPipe", "1F1B"], None),
    ],
)
def test_nearest(word: str, legal: list[str], meant: str | None) -> None:
    assert nearest(word, legal) == meant
