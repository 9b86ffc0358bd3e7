"""A checked run file: all problems at once, none twice, and a job with nothing left open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from koushi.check.check import RULES, check, check_afar
from koushi.check.rule import TP_OF_MODEL
from koushi.config.load import load
from koushi.config.validate import legal_keys
from koushi.errors import ConfigError, Problem
from koushi.job import Job

Checked = Callable[..., Job]
Problems = Callable[..., tuple[Problem, ...]]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("parallelism: {tensor_parallel_degree: 2, world_size: 8}", 1),
        ("parallelism: {data_parallel_shard_degree: -1}", 1),
        ("model: {name: llama3-8}", 1),
        ("model: {n_kv_heads: 3}", 1),
        ("parallelism: {tensor_parallel_degree: 3}", 1),
        ("parallelism: {tensor_parallel_degree: 3, world_size: 16}", 1),
        ("parallelism: {tensor_parallel_degree: 3, data_parallel_shard_degree: -1, world_size: 16}", 1),
        ("model: {n_kv_heads: 8, n_heads: 8}\nparallelism: {tensor_parallel_degree: 16, world_size: 48}", 2),
        ("model: {vocab_size: 1021}\nparallelism: {tensor_parallel_degree: 2}", 1),
        ("parallelism: {pipeline_parallel_degree: 2}\ntraining: {global_batch_size: 1}", 1),
        ("precision: {parameters: float64}", 2),
    ],
)
def test_one_fault_is_not_told_twice(problems: Problems, text: str, count: int) -> None:
    assert len(problems(text)) == count


def test_ten_mistakes_make_ten_problems_in_the_order_of_the_file(problems: Problems) -> None:
    found = problems(
        "model: {ffn_dim: 770, vocab_size: 2050}\n"
        "parallelism: {tensor_parallel_degree: 4, world_size: 5}\n"
        "training:\n"
        "  stepz: 100\n"
        "  seq_len: 510\n"
        "  global_batch_size: 9\n"
        "  microbatch_size: 2\n"
        "  compile: no\n"
        "optimizer: {lr: .nan, name: adamw}\n"
        "precision: {compute: float64}\n"
        "metrics: {every: 1, every: 2}\n"
    )
    assert [(one.where, one.key) for one in found] == [
        ("run.yaml:1:18", "model.ffn_dim"),
        ("run.yaml:1:35", "model.vocab_size"),
        ("run.yaml:2:54", "parallelism.world_size"),
        ("run.yaml:4:3", "training.stepz"),
        ("run.yaml:5:12", "training.seq_len"),
        ("run.yaml:7:20", "training.microbatch_size"),
        ("run.yaml:8:12", "training.compile"),
        ("run.yaml:9:17", "optimizer.lr"),
        ("run.yaml:9:29", "optimizer.name"),
        ("run.yaml:10:22", "precision.compute"),
        ("run.yaml:11:21", "metrics.every"),
    ]


def test_a_rule_is_left_out_only_where_its_own_keys_are_wrong(problems: Problems) -> None:
    found = problems(
        "parallelism: {tensor_parallel_degree: x, data_parallel_shard_degree: 3}\ntraining: {global_batch_size: 8}\n"
    )
    assert [one.key for one in found] == ["parallelism.tensor_parallel_degree", "training.global_batch_size"]
    # -1 stands for what is left, which a wrong tp leaves unknown.
    found = problems(
        "parallelism: {tensor_parallel_degree: x, data_parallel_shard_degree: -1, world_size: 6}\n"
        "training: {global_batch_size: 7}\n"
    )
    assert [one.key for one in found] == ["parallelism.tensor_parallel_degree"]


def test_a_misspelled_key_does_not_start_false_alarms(problems: Problems) -> None:
    found = problems("parallelism: {tp: 8, world_size: 8}\n")
    assert [one.key for one in found] == ["parallelism.tp"]


def test_a_default_at_fault_is_placed_at_its_section_or_the_first_line(problems: Problems) -> None:
    (found,) = problems("# one\ntraining:\n  seq_len: 512\n", world=3)
    assert (found.where, found.key) == ("run.yaml:1:1", "parallelism.world_size")
    (found,) = problems("# one\nparallelism:\n  reshard_after_forward: auto\n", world=3)
    assert found.where == "run.yaml:2:1"


def test_an_override_is_placed_on_the_command_line(problems: Problems) -> None:
    found = problems("model: {ffn_dim: 768}\n", "--tp", "3")
    assert {(one.where, one.key) for one in found} == {("command line (--tp 3)", "parallelism.tensor_parallel_degree")}


def test_the_launched_world_must_be_the_one_that_was_asked_for(problems: Problems) -> None:
    text = "parallelism: {data_parallel_shard_degree: -1, world_size: 4}\n"
    assert problems(text, world=4) == ()
    (found,) = problems(text, world=8)
    assert found.what == "is 4, but the world has 8 processes"
    assert found.legal == "8 or --gpus 8, or leave it empty"


@pytest.mark.parametrize("shard", [-1, 4])
def test_two_worlds_are_one_problem(problems: Problems, shard: int) -> None:
    """What the degrees should multiply to is not known then, nor how many ranks the batch is divided over."""
    text = f"parallelism: {{data_parallel_shard_degree: {shard}, world_size: 4}}\ntraining: {{global_batch_size: 6}}\n"
    (found,) = problems(text, "--gpus", "12", world=8)
    assert (found.what, found.legal) == ("is 12, but the world has 8 processes", "8, or leave it out")


DEGREES = "pipeline_parallel_degree: {}, tensor_parallel_degree: {}, data_parallel_replicate_degree: {}"


@pytest.mark.parametrize("rest", ["", ", pipeline_parallel_stages_per_rank: 1", ", pipeline_parallel_layers_per_stage"])
@pytest.mark.parametrize("shard", ["2", "-1, world_size: 64"])
@pytest.mark.parametrize(("pp", "tp", "replicate"), [(2, 2, 1), (4, 1, 1), (1, 8, 1), (1, 1, 8), (3, 2, 2)])
def test_a_world_too_small_for_the_other_degrees_is_told_with_options_that_do(
    problems: Problems, pp: int, tp: int, replicate: int, shard: str, rest: str
) -> None:
    if rest.endswith("per_stage"):
        rest += f": [{', '.join('2' for _ in range(pp))}]" if pp > 1 else ": null"
    degrees = f"{DEGREES.format(pp, tp, replicate)}, data_parallel_shard_degree: {shard}{rest}"
    text = (
        f"model: {{n_layers: {2 * pp}}}\nparallelism: {{{degrees}}}\n"
        "training: {global_batch_size: 27720, microbatch_size: 1}\n"
    )
    for world in range(1, pp * tp * replicate):
        (found,) = problems(text, "--gpus", str(world))
        options, _, others = found.legal.partition(", or ")
        assert others.startswith(f"a world of {pp * replicate * tp}") and options.startswith("--")
        assert problems(text, "--gpus", str(world), *options.split()) == (), options
    assert problems(text, "--gpus", "1")[0].legal.startswith(
        " ".join(f"--{name} 1" for name, degree in (("pp", pp), ("tp", tp), ("dp-replicate", replicate)) if degree > 1)
    )


@pytest.mark.parametrize("shard", ["256", "-1, world_size: 256"])
def test_degrees_that_gpus_cannot_follow_are_one_problem(problems: Problems, shard: str) -> None:
    """How the batch divides then, and how many microbatches the pipeline gets, nobody knows."""
    text = f"parallelism: {{data_parallel_shard_degree: {shard}}}\ntraining: {{global_batch_size: 256}}\n"
    assert problems(text) == ()
    (found,) = problems(text, "--pp", "3", "--gpus", "64")
    assert "a world of 63 or 66" in found.legal
    assert len(problems(text, "--pp", "3", "--gpus", "64", "--dp-shard", "256")) == 2, "which is wrong by itself"


def test_no_vocabulary_is_offered_that_is_too_small_for_the_tokenizer(problems: Problems, tmp_path: Path) -> None:
    vocab = {str(number): number for number in range(1021)}
    added = [{"id": 3, "content": "</s>"}]
    (tmp_path / "odd.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    text = "model: {vocab_size: 1021}\ndata: {source: text, path: run.yaml, tokenizer: odd.json}\n"
    (found,) = problems(text, "--tp", "2")
    assert found.legal.startswith("vocab_size 1022; ")
    (found,) = problems(text, "--tp", "2", "data.source=synthetic", "data.path=null")
    assert found.legal.startswith("vocab_size 1020 or 1022; ")


def test_a_schedule_is_not_looked_at_without_a_pipeline(checked: Checked) -> None:
    text = "parallelism: {pipeline_parallel_schedule: DualPipeV}\ntraining: {compile: true, global_batch_size: 1}"
    job = checked(text)
    assert job.stages == (range(6),)
    assert job.stages_per_rank == 1


def test_minus_one_and_empty_values_are_resolved(checked: Checked) -> None:
    job = checked(
        "parallelism: {pipeline_parallel_degree: 2, data_parallel_shard_degree: -1, tensor_parallel_degree: 2,\n"
        "  pipeline_parallel_schedule: ZBVZeroBubble}\nmodel: {dim: 128}\ntraining: {global_batch_size: 9}\n",
        world=12,
    )
    parallelism = job.config.parallelism
    assert str(job.mesh) == "[pp=2, dp_replicate=1, dp_shard=3, cp=1, tp=2]"
    assert parallelism.data_parallel_shard_degree == 3
    assert parallelism.world_size == 12
    assert parallelism.pipeline_parallel_stages_per_rank == 2
    assert parallelism.pipeline_parallel_layers_per_stage == (1, 2, 2, 1)
    assert parallelism.reshard_after_forward == "never"
    assert job.stages == (range(1), range(1, 3), range(3, 5), range(5, 6))
    assert (job.config.model.dim, job.config.model.n_heads) == (128, 8)
    assert job.name == "run"


def test_a_resolved_config_is_a_run_file_of_the_same_job(checked: Checked) -> None:
    text = "parallelism: {pipeline_parallel_degree: 2, data_parallel_shard_degree: -1, world_size: 8}\n"
    for more in ("", "model: {name: llama3-1b}\n"):
        job = checked(text + more)
        assert checked(json.dumps(job.config.model_dump(mode="json"))) == job


@pytest.mark.usefixtures("neighbours")
def test_a_resolved_config_finds_its_files_from_any_folder(checked: Checked, tmp_path: Path) -> None:
    (tmp_path / "folder" / "text.txt").write_text("some text")
    data = checked("model: {vocab_size: 200064}\ndata: {source: text, path: folder, tokenizer: large.json}").config.data
    assert (data.path, data.tokenizer) == (str(tmp_path / "folder"), str(tmp_path / "large.json"))
    assert checked("data: {source: synthetic}").config.data.tokenizer == "embedded"


def test_uneven_stages_stay_as_written(checked: Checked) -> None:
    text = "parallelism: {pipeline_parallel_degree: 3, pipeline_parallel_layers_per_stage: [0, 6, 0]}"
    assert checked(text).stages == (range(0), range(6), range(6, 6))


def test_tensorboard_has_to_be_installed(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koushi.check.training_rules.find_spec", lambda name: None)
    (found,) = problems("metrics: {tensorboard: true}")
    assert (found.key, found.legal) == ("metrics.tensorboard", "pip install koushi[tensorboard]")
    monkeypatch.setattr("koushi.check.training_rules.find_spec", lambda name: object())
    assert problems("metrics: {tensorboard: true}") == ()


def test_a_run_folder_must_not_be_a_file(problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    (found,) = problems(f"run: {{folder: {tmp_path}/taken}}")
    assert found.key == "run.folder"
    assert problems(f"run: {{folder: {tmp_path}/free}}") == ()


@pytest.mark.usefixtures("neighbours")
@pytest.mark.parametrize(
    "data",
    [
        "{source: text, path: run.yaml}",
        "{source: text, path: '*.yaml'}",
        "{source: tokens, path: even.bin}",
        "{source: tokens, path: 'e*.bin', token_dtype: uint32}",
        "{source: synthetic, masked_fraction: 0.5}",
        "{source: embedded, tokenizer: embedded}",
    ],
)
def test_data_that_is_there_is_accepted(problems: Problems, data: str) -> None:
    assert problems(f"data: {data}") == ()


def test_rules_read_keys_of_the_schema() -> None:
    read = {key for rule in RULES for key in rule.reads}
    assert read <= {*legal_keys(), TP_OF_MODEL}


def test_nothing_wrong_raises_nothing_and_something_wrong_a_config_error(checked: Checked) -> None:
    assert checked("model:\n").mesh.world_size == 1
    with pytest.raises(ConfigError) as raised:
        checked("model: {dim: x, n_layers: y}")
    assert len(raised.value.problems) == 2
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("devices", [2**20 + 2, 10**18, 2**63, 10**30])
@pytest.mark.parametrize("shard", [-1, 2])
def test_too_many_devices_are_told_once(problems: Problems, devices: int, shard: int) -> None:
    text = f"parallelism: {{data_parallel_shard_degree: {shard}, tensor_parallel_degree: 2}}"
    (found,) = problems(text, "--gpus", str(devices))
    assert found.key == "parallelism.world_size" and f"is {devices}, " in found.what


def test_what_only_this_machine_lacks_is_a_note_to_who_does_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koushi.check.training_rules.find_spec", lambda name: None)
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {resume: /ckpt/none}\ndata: {source: text, path: /data/*.txt, tokenizer: /models/none.json}\n"
        "metrics: {tensorboard: true}\n"
    )
    with pytest.raises(ConfigError) as raised:
        check(load(path))
    job, notes = check_afar(load(path))
    assert job.size.vocab_size == 2048
    assert [note.split(";")[0] for note in notes] == [str(one).split(";")[0] for one in raised.value.problems]
    assert [note.split(": ")[1] for note in notes] == [
        "run.resume",
        "data.path",
        "data.tokenizer",
        "metrics.tensorboard",
    ]
    assert "; whether its ids fit vocab_size 2048 is left to the machine that trains" in notes[2]


@pytest.mark.parametrize(
    "text",
    [
        "data: {source: text}",  # no path at all
        "data: {tokenizer: run.yaml}",  # there, and no tokenizer
        "data: {source: jsonl, path: empty}",
        "model: {vocab_size: 1000}",  # too few for the tokenizer, which is there
        "model: {hf: none}",
        "run: {resume: ''}",
        "run: {hardware: none}",
    ],
)
def test_what_is_wrong_anywhere_is_refused_from_afar_too(text: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    path = tmp_path / "run.yaml"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError) as near:
        check(load(path))
    with pytest.raises(ConfigError) as afar:
        check_afar(load(path))
    assert afar.value.problems == near.value.problems


OVERRIDES = (
    "run.hardware=here/mine.yaml",
    "model.hf=here",
    "data.path=here/*.txt",
    "data.tokenizer=here/tokenizer.json",
)


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_with_a_path_of_the_current_folder_is_told_how_paths_are_taken(
    problems: Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    folder = tmp_path / "work" / "here"
    folder.mkdir(parents=True)
    for name in ("mine.yaml", "tokenizer.json", "text.txt"):
        (folder / name).write_text("{}", encoding="utf-8")
    key, _, value = override.partition("=")
    text = "data: {source: text, path: none}\n" if key.startswith("data") else "training: {seed: 1}\n"

    def told(*overrides: str) -> list[str]:
        return [one.legal.rpartition("; ")[2] for one in problems(text, *overrides) if one.key == key]

    rule = "paths start from the run file's folder"
    monkeypatch.chdir(tmp_path / "work")
    assert told(override) == [f"{rule}, from which that in the current folder is work/{value}"]
    assert rule not in "".join(told(f"{key}=none/{value}")), "nothing is there in the current folder either"
    monkeypatch.chdir(tmp_path)
    assert rule not in "".join(told(override)), "the current folder is the run file's"
