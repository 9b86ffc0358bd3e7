"""By itself a run goes on as it began, on any layout; with anything else it is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY, tiny_file, tiny_job

from koushi.config.load import load
from koushi.config.schema import JobConfig
from koushi.data.batches import open_samples
from koushi.data.samples import Samples
from koushi.errors import RunRefused, WrongCheckpoint
from koushi.job import Job
from koushi.train import command
from koushi.train.changes import changes, is_another_folder
from koushi.train.command import train
from koushi.train.resume import check_data, run_place

RUN = TINY + "checkpoint: {every: 2, mode: sync}\n"
FOLDER = Path("runs/tiny")
UNFINISHED = ("training.steps=5",)
OTHER_RUNS = {
    "optimizer.lr=1e-4": "optimizer.lr 0.01 -> 0.0001",
    "training.seed=1": "training.seed 0 -> 1",
    "training.seq_len=16": "training.seq_len 8 -> 16",
    "training.global_batch_size=8": "training.global_batch_size 4 -> 8",
    "data.masked_fraction=0.5": "data.masked_fraction 0.0 -> 0.5, the training data itself",
    "lr_schedule.warmup_steps=1": "lr_schedule.warmup_steps 0 -> 1",
    "precision.compute=bfloat16": "precision.compute float32 -> bfloat16",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file and a finished run of 3 steps on one process."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(tiny_file(folder, RUN))
    return folder


@pytest.fixture
def path(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run file, in a copy of the folder that is the current one."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny.yaml"


def everything(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder in ``folder``, with its content."""
    return {str(one): one.read_bytes() if one.is_file() else None for one in sorted(folder.rglob("*"))}


def refusal(path: Path, *overrides: str) -> str:
    """What a refused run is told, which has written nothing."""
    before = everything(path.parent / "runs")
    with pytest.raises(RunRefused) as caught:
        train(path, overrides)
    assert caught.value.exit_code == 2
    assert everything(path.parent / "runs") == before
    return str(caught.value)


def steps(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "loss" in row]


@pytest.mark.parametrize("more", [(), UNFINISHED], ids=["finished", "unfinished"])
@pytest.mark.parametrize("override", OTHER_RUNS)
def test_another_run_is_refused(override: str, more: tuple[str, ...], path: Path) -> None:
    longer = "" if more else " with training.steps above 3"
    assert refusal(path, override, *more).splitlines() == [
        f"runs/tiny holds another run, saved at step 3; what differs: {OTHER_RUNS[override]}",
        "  --resume never begins anew in runs/tiny-2, another run.folder in one of its own",
        f"  --resume runs/tiny{longer} goes on from it with the change, in runs/tiny-2",
    ]


def test_all_that_differs_is_told_and_a_named_folder_has_other_ways_out(path: Path) -> None:
    said = refusal(path, "run.folder=runs/tiny", "optimizer.lr=1e-4", "training.seed=1", *UNFINISHED)
    assert said.splitlines() == [
        "runs/tiny holds another run, saved at step 3; what differs: training.seed 0 -> 1, optimizer.lr 0.01 -> 0.0001",
        "  another run.folder begins anew",
        "  --resume runs/tiny goes on from it with the change, in another run.folder",
    ]
    train(path, ["run.folder=other", "run.resume=runs/tiny", "optimizer.lr=1e-4", *UNFINISHED])
    assert steps(Path("other")) == [4, 5]


def test_another_model_has_the_ways_out_that_it_has(path: Path) -> None:
    before = everything(path.parent)
    for overrides, anew in (
        ((), "--resume never begins anew in runs/tiny-2, another run.folder in one of its own"),
        (("run.folder=runs/tiny",), "another run.folder begins anew"),
    ):
        with pytest.raises(WrongCheckpoint) as caught:
            train(path, ["model.dim=32", *overrides])
        assert str(caught.value).endswith(f"is a checkpoint of another model: it has dim 16 (here 32); {anew}")
        assert everything(path.parent) == before


def test_another_layout_and_all_that_is_only_watched_goes_on(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layout = ("--dp-shard", "2", "training.microbatch_size=2", "training.recompute=full", "training.steps=4")
    watched = ("metrics.every=2", "validation.every=3", "checkpoint.every=3", "run.timeout=50", "debug.audit=true")
    train(path, [*layout, *watched])
    assert steps(FOLDER) == [1, 2, 3, 4]
    assert capfd.readouterr().err.endswith("\nchanged since: training.steps 3 -> 4\n")


@pytest.mark.parametrize(
    "layout",
    [
        ("--tp", "2"),
        ("--dp-replicate", "2", "--dp-shard", "2"),
        ("--dp-shard", "-1", "--gpus", "4"),
        ("--dp-shard", "2", "parallelism.reshard_after_forward=never"),
        ("--pp", "3", "parallelism.pipeline_parallel_schedule=GPipe"),
        ("--pp", "2", "parallelism.pipeline_parallel_layers_per_stage=[1,2]"),
        ("training.compile=true", "training.recompute=selective", "training.microbatch_size=4"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("more", [(), UNFINISHED], ids=["finished", "unfinished"])
def test_every_layout_finds_the_checkpoint(layout: tuple[str, ...], more: tuple[str, ...], path: Path) -> None:
    job = tiny_job(path.parent, "checkpoint.every=2", *layout, *more)
    place = run_place(job)
    check_data(job, place, open_samples(job))
    assert place.folder == FOLDER and [one.name for one in place.found] == ["step-00000003", "step-00000002"]


def test_a_path_that_is_named_may_change_anything_in_a_folder_of_its_own(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = everything(FOLDER)
    change = ("optimizer.lr=1e-4", "training.seq_len=16", *UNFINISHED)
    train(path, ["run.resume=runs/tiny", *change])
    assert everything(FOLDER) == before
    assert steps(Path("runs/tiny-2")) == [4, 5]
    said = capfd.readouterr().err
    assert "resuming from runs/tiny/checkpoints/step-00000003: step 3 of 5, " in said
    assert "; writing into runs/tiny-2\n" in said
    assert "changed since: training.seq_len 8 -> 16, training.steps 3 -> 5, optimizer.lr 0.01 -> 0.0001" in said
    # Its own folder is the last one, so that it goes on by itself, and what began it does not.
    train(path, [*change, "training.steps=6"])
    assert steps(Path("runs/tiny-2")) == [4, 5, 6]
    assert "runs/tiny-2 holds another run, saved at step 6" in refusal(path)


def test_ranks_that_are_started_again_are_refused_unless_they_had_begun(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    refusal(path, "optimizer.lr=1e-4")
    job = tiny_job(path.parent, "checkpoint.every=2", "training.seed=1", *UNFINISHED)
    place = run_place(job, FOLDER)
    assert place.folder == FOLDER and place.found
    check_data(job, place, open_samples(job), FOLDER)
    with pytest.raises(RunRefused, match="the training data itself"):
        check_data(job, place, open_samples(job))


@pytest.mark.parametrize("more", [(), UNFINISHED], ids=["finished", "unfinished"])
def test_other_training_data_is_refused_wherever_it_lies(
    more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))
    ids = np.arange(500, dtype="<u2") % 32
    ids.tofile(tmp_path / "one.bin")
    (tmp_path / "elsewhere").mkdir()
    ids.tofile(tmp_path / "elsewhere" / "two.bin")
    path = tiny_file(tmp_path, RUN.replace("synthetic", "tokens, path: one.bin"))
    train(path)
    train(path, ["data.path=elsewhere/two.bin", *more])
    ids[:40].tofile(tmp_path / "one.bin")
    before = everything(tmp_path / "runs")
    with pytest.raises(
        RunRefused, match=r"what differs: (data\.path .*, )?the training data itself\n  --resume never begins anew in "
    ):
        train(path, more)
    assert everything(tmp_path / "runs") == before
    train(path, ["run.resume=runs/tiny", "training.steps=6"])
    assert steps(Path("runs/tiny-2"))[-1] == 6


def test_every_key_that_is_not_of_the_layout_tells_another_run() -> None:
    """Whatever value it has; a key that the schema gets later must be decided on here or refuses."""
    now = JobConfig().model_dump(mode="json")
    free = {"parallelism", "validation", "metrics", "checkpoint", "run", "debug"}
    layout = {"training.microbatch_size", "training.recompute", "training.compile"}
    allowed = {"training.steps", *(f"data.{key}" for key in now["data"])}  # of data, the samples are compared
    for section in now.keys() - {"model"}:
        for key in now[section]:
            name = f"{section}.{key}"
            found = list(changes(now | {section: now[section] | {key: "other"}}, now))
            assert [one.key for one in found] == ([] if section in free or name in layout else [name])
            assert [one.key for one in found if one.is_another_run] == [one.key for one in found if name not in allowed]
    assert list(changes(now, now)) == []


def test_what_an_older_version_did_not_write_had_its_default() -> None:
    now = JobConfig().model_dump(mode="json")
    older = {**now, "optimizer": {"lr": now["optimizer"]["lr"]}, "model": {}}
    assert list(changes(older, now)) == []
    now["optimizer"]["eps"] = 1.0
    assert [str(one) for one in changes(older, now)] == ["optimizer.eps 1e-08 -> 1.0"]


def test_a_folder_that_was_moved_is_not_another(tmp_path: Path) -> None:
    for name in ("a/model", "b/model", "b/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "of another name").symlink_to("a/model")
    here, there, other, gone = (str(tmp_path / name) for name in ("a/model", "b/model", "b/other", "gone/model"))
    assert is_another_folder(here, there) and is_another_folder(here, other) and is_another_folder(gone, other)
    assert not is_another_folder(gone, here)
    assert not is_another_folder(here, str(tmp_path / "link" / "model"))
    assert is_another_folder(None, here), "of a run that began from random weights"
    assert not is_another_folder(here, None) and not is_another_folder(None, None)
    assert not is_another_folder(None, gone), "the folder is gone, and so it was when the run was last saved"
    assert not is_another_folder(here, str(tmp_path / "of another name"))
    assert is_another_folder(here, gone), "what is named now is missing; what the run began from is there"


@pytest.mark.parametrize("changed", ["middle", "order"])
def test_training_data_is_told_by_all_of_it(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by how much there is and where it begins and ends alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))
    ids = np.arange(500, dtype="<u2") % 32
    ids.tofile(tmp_path / "one.bin")
    path = tiny_file(tmp_path, RUN.replace("synthetic", "tokens, path: one.bin"))
    train(path)
    ids[200:300] = 0 if changed == "middle" else ids[200:300][::-1]
    ids.tofile(tmp_path / "one.bin")
    assert "; what differs: the training data itself" in refusal(path, *UNFINISHED)


def test_settings_of_data_that_make_no_other_samples_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "cache"))
    (np.arange(500, dtype="<u2") % 32).tofile(tmp_path / "one.bin")
    path = tiny_file(tmp_path, RUN.replace("synthetic", "tokens, path: one.bin"))
    train(path)
    train(path, ["data.text_key=body", *UNFINISHED])
    assert steps(FOLDER) == [1, 2, 3, 4, 5]


def test_weights_that_a_run_did_not_begin_from_are_refused(path: Path) -> None:
    job = tiny_job(path.parent, "checkpoint.every=2", *UNFINISHED)
    (path.parent / "pretrained").mkdir()
    theirs = job.config.model.model_copy(update={"hf": str(path.parent / "pretrained")})
    with pytest.raises(RunRefused, match=r"what differs: model\.hf None -> .*pretrained"):
        run_place(replace(job, config=job.config.model_copy(update={"model": theirs})))


@pytest.fixture
def unsaved(path: Path) -> Path:
    """The run file of a run that ended before its first checkpoint."""
    shutil.rmtree(FOLDER / "checkpoints")
    (FOLDER / "checkpoints").mkdir()
    return path


@pytest.mark.parametrize("override", [*OTHER_RUNS, "model.dim=32"])
def test_another_run_is_refused_where_nothing_was_saved_too(override: str, unsaved: Path) -> None:
    """Its metrics and its run file are those of a run."""
    before = everything(unsaved.parent)
    with pytest.raises(RunRefused) as caught:
        train(unsaved, [override, *UNFINISHED])
    assert everything(unsaved.parent) == before
    first, *ways = str(caught.value).splitlines()
    assert first.startswith("runs/tiny holds another run, which has saved no checkpoint yet; what differs: ")
    assert ways == ["  --resume never begins anew in runs/tiny-2, another run.folder in one of its own"]


def test_the_same_run_begins_again_where_nothing_was_saved(unsaved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(unsaved, UNFINISHED)
    assert steps(FOLDER) == [1, 2, 3, 4, 5]
    assert "no checkpoint yet: beginning again at step 1" in capfd.readouterr().err


def test_what_a_run_was_told_to_begin_from_holds_until_it_has_saved(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = ("optimizer.lr=1e-4", *UNFINISHED)
    train(path, ["run.resume=runs/tiny", *change])
    own = Path("runs/tiny-2")
    shutil.rmtree(own / "checkpoints")
    (own / "checkpoints").mkdir()
    train(path, change)
    assert steps(own) == [4, 5], "from step 3 of runs/tiny"
    refusal(path, "training.seed=3", *UNFINISHED)


def test_never_begins_anew_where_only_checkpoints_are_left(path: Path) -> None:
    (FOLDER / "metrics.jsonl").unlink()
    train(path, ["run.resume=never", "optimizer.lr=1e-4"])
    assert steps(Path("runs/tiny-2")) == [1, 2, 3]


def test_the_folder_of_the_same_run_is_named_where_the_last_holds_another(path: Path) -> None:
    train(path, ["run.resume=never", "optimizer.lr=1e-4"])
    assert refusal(path, *UNFINISHED).splitlines()[-1] == (
        "  run.folder=runs/tiny goes on with the run in runs/tiny, of which nothing differs"
    )
    train(path, ["run.folder=runs/tiny", *UNFINISHED])
    assert steps(FOLDER) == [1, 2, 3, 4, 5]


def test_a_folder_that_another_run_took_meanwhile_is_not_written_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that began and ended while this one prepared its data."""
    opened = command.open_samples

    def late(job: Job) -> Samples:
        monkeypatch.setattr(command, "open_samples", opened)
        train(path, ["run.resume=never", "optimizer.lr=1e-4"])
        return opened(job)

    monkeypatch.setattr(command, "open_samples", late)
    train(path, ["run.resume=never"])
    rates = [load(Path(f"runs/tiny-{number}") / "config.yaml").config.optimizer.lr for number in (2, 3)]
    assert rates == [1e-4, 1e-2]
