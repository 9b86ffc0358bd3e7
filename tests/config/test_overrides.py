"""Values on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from koushi.config.load import RunFile, load
from koushi.config.overrides import parse, split_run_path

FILE = "parallelism:\n  tensor_parallel_degree: 2\noptimizer:\ntraining: {steps: 7}\n"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def messages(loaded: RunFile) -> list[str]:
    return [str(one.problem) for one in loaded.found]


@pytest.mark.parametrize(
    ("arguments", "section", "key", "value"),
    [
        (["training.steps=9"], "training", "steps", 9),
        (["--training.steps", "9"], "training", "steps", 9),
        (["--training.steps=9"], "training", "steps", 9),
        (["training.steps=8", "--training.steps", "9"], "training", "steps", 9),
        (["--tp", "4"], "parallelism", "tensor_parallel_degree", 4),
        (["--tp=4"], "parallelism", "tensor_parallel_degree", 4),
        (["--pp", "3"], "parallelism", "pipeline_parallel_degree", 3),
        (["--dp-shard", "-1"], "parallelism", "data_parallel_shard_degree", -1),
        (["--dp-replicate=6"], "parallelism", "data_parallel_replicate_degree", 6),
        (["optimizer.lr=3e-4"], "optimizer", "lr", 3e-4),
        (["training.max_grad_norm=null"], "training", "max_grad_norm", None),
        (["training.compile=true"], "training", "compile", True),
        (
            ["parallelism.pipeline_parallel_layers_per_stage=[1,2]"],
            "parallelism",
            "pipeline_parallel_layers_per_stage",
            (1, 2),
        ),
        (["data.path=*.txt"], "data", "path", "*.txt"),
        (["data.path=a #b: c"], "data", "path", "a #b: c"),
        (["data.path=a=b"], "data", "path", "a=b"),
        (["data.path='8'"], "data", "path", "8"),
        (["model={name: x, dim: 8}", "model.dim=9"], "model", "dim", 9),
        (["model.rope_scaling.factor=4", "model.dim=3"], "model", "dim", 3),
    ],
)
def test_overrides_win(run_file: Path, arguments: list[str], section: str, key: str, value: object) -> None:
    loaded = load(run_file, arguments)
    assert messages(loaded) == []
    found = getattr(getattr(loaded.config, section), key)
    assert found == value
    assert type(found) is type(value)


def test_what_is_not_overridden_stays(run_file: Path) -> None:
    loaded = load(run_file, ["--pp", "2"])
    assert loaded.config.parallelism.tensor_parallel_degree == 2
    assert loaded.config.training.steps == 7
    assert loaded.places["parallelism.pipeline_parallel_degree"].text == "command line (--pp 2)"
    assert loaded.places["parallelism.tensor_parallel_degree"].text == f"{run_file}:2:27"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["training.steps=x"],
            "command line (training.steps=x): training.steps: is 'x', a string; an integer of at least 1 is needed",
        ),
        (
            ["--training.stepz", "3"],
            "command line (--training.stepz 3): training.stepz: is not a key of training; did you mean training.steps?",
        ),
        (["--tp"], "--tp (parallelism.tensor_parallel_degree): has no value; write --tp=value"),
        (
            ["training.max_grad_norm="],
            "command line (training.max_grad_norm=): training.max_grad_norm: is given no value; write a value, null ",
        ),
        (["words"], "command line (words): 'words' is not an override; write section.key=value, or --section.key v"),
        (["=3"], "command line (=3): names no key; write section.key=value, or --section.key value"),
        (["a..b=3"], "command line (a..b=3): names no key; write section.key=value, or --section.key value"),
        (
            ["--tp-size=3"],
            "command line (--tp-size=3): --tp-size: is not an option; did you mean --tp "
            "(parallelism.tensor_parallel_degree)?",
        ),
        (
            ["--colour=3"],
            "command line (--colour=3): --colour: is not an option; the options are --gpus, --hardware, --pp, "
            "--dp-replicate, --dp-shard, --tp, and --section.key value for the sections model, parallelism, training, ",
        ),
        (
            ["model=llama3-8b"],
            "command line (model=llama3-8b): model: is 'llama3-8b', a string; a section of keys is needed",
        ),
        (
            ["data.path=[1"],
            "command line (data.path=[1): data.path: is not valid YAML: expected ',' or ']', "
            "but got '<stream end>'; check quotes and brackets",
        ),
        (["optimizer.lr={a: 1, a: 2}"], "command line (optimizer.lr={a: 1, a: 2}): optimizer.lr: is written twice"),
    ],
)
def test_wrong_overrides_are_named_as_written(run_file: Path, arguments: list[str], message: str) -> None:
    assert any(one.startswith(message) for one in messages(load(run_file, arguments))), messages(
        load(run_file, arguments)
    )


def test_a_key_below_a_value_is_refused_together_with_its_own_fault(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: 5\n")
    assert messages(load(path, ["training.stepz=3"])) == [
        f"{path}:1:11: training: is not a section; a section of keys is needed",
        "command line (training.stepz=3): training.stepz: is not a key of training; did you mean training.steps?",
    ]


def test_an_override_mends_a_wrong_value_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("training: {steps: ten}\n")
    assert len(messages(load(path))) == 1
    assert messages(load(path, ["training.steps=10"])) == []


@pytest.mark.parametrize(
    ("arguments", "shard", "follows"),
    [
        (["--gpus", "12"], 6, True),
        (["training.steps=2", "--gpus=12", "--pp", "2"], 3, True),
        (["--gpus", "12", "--gpus", "4"], 2, True),
        (["--gpus", "2"], 1, False),  # as it is
        (["--gpus", "12", "--dp-shard", "3"], 3, False),
        (["--gpus", "12", "parallelism.data_parallel_shard_degree=-1"], -1, False),
        (["--gpus", "7"], 1, False),  # for the check to refuse
        (["--gpus", "twelve"], 1, False),
        (["--gpus", "0"], 1, False),
        (["--gpus", "8", "--tp", "two"], 1, False),
        (["--gpus"], 1, False),
        (["parallelism.world_size=12"], 1, False),
    ],
)
def test_dp_shard_follows_gpus(run_file: Path, arguments: list[str], shard: int, follows: bool) -> None:
    loaded = load(run_file, arguments)
    assert loaded.config.parallelism.data_parallel_shard_degree == shard
    assert loaded.follows is follows
    if follows:
        key = "parallelism.data_parallel_shard_degree"
        assert loaded.places[key] == loaded.places["parallelism.world_size"]
        assert loaded.values["parallelism"]["data_parallel_shard_degree"] == shard


def test_a_hardware_file_is_found_from_here(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load(run_file, ["--hardware", "mine.yaml"]).config.run.hardware == str(Path("mine.yaml").absolute())
    assert load(run_file, ["--hardware", "h100"]).config.run.hardware == "h100"
    assert load(run_file, ["run.hardware=mine.yaml"]).config.run.hardware == "mine.yaml"


def test_every_argument_is_numbered_in_order() -> None:
    parsed = parse(["--tp", "2", "a.b=1", "--c.d"])
    assert [(one.number, one.text, one.key, one.value) for one in parsed] == [
        (1, "--tp 2", "parallelism.tensor_parallel_degree", "2"),
        (2, "a.b=1", "a.b", "1"),
        (3, "--c.d", "c.d", None),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run.yaml", "--tp", "2", "a.b=1"],
        ["--tp", "2", "run.yaml", "a.b=1"],
        ["--tp", "2", "a.b=1", "run.yaml"],
    ],
)
def test_the_run_file_may_stand_anywhere(arguments: list[str]) -> None:
    assert split_run_path(arguments) == ("run.yaml", ["--tp", "2", "a.b=1"])


def test_no_run_file_is_told_from_overrides() -> None:
    assert split_run_path(["--tp", "2", "a=b", "-x"]) == (None, ["--tp", "2", "a=b", "-x"])
    assert split_run_path(["run.yaml", "word"]) == ("run.yaml", ["word"])


def test_a_run_file_may_have_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lr=3.yaml", "lr=3", "training.steps=3"):
        Path(name).write_text(FILE)
    steps = "training.steps=5"
    assert split_run_path([steps, "lr=3.yaml", "--tp", "2"]) == ("lr=3.yaml", [steps, "--tp", "2"])
    assert split_run_path(["lr=3", steps]) == ("lr=3", [steps])
    assert split_run_path(["a/lr=4.yaml", "run.hardware=x.yaml"]) == ("a/lr=4.yaml", ["run.hardware=x.yaml"])
    # What names a section is an override as long as there is another run file.
    assert split_run_path(["training.steps=3", "run.yaml"]) == ("run.yaml", ["training.steps=3"])
    assert split_run_path(["training.steps=3"]) == ("training.steps=3", [])
    assert split_run_path(["run.hardware=x.yaml"]) == (None, ["run.hardware=x.yaml"])
    assert split_run_path(["--data.path", "lr=3.yaml"]) == (None, ["--data.path", "lr=3.yaml"])
