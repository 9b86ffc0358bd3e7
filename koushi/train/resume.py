"""Where a run writes, and what it goes on from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from koushi.checkpoint.folders import published
from koushi.checkpoint.newest import candidates, check_size, newest, size_differences
from koushi.config.load import RunFile, load
from koushi.config.schema import JobConfig, Model, Run
from koushi.data.samples import Samples
from koushi.errors import CheckpointError, ConfigError, RunRefused, WeightsError
from koushi.job import Job
from koushi.models.llama.hf import check_folder
from koushi.run_folder import CHECKPOINTS, RESOLVED, folders_of, holds_run, run_folder
from koushi.train.changes import DATA, changes, is_another_folder


@dataclass(frozen=True)
class RunPlace:
    """A run's folder, and a checkpoint elsewhere to begin from."""

    folder: Path
    source: Path | None = None
    """A checkpoint or run folder that the run begins from, as long as it has no checkpoint of its own."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def found(self) -> list[Path]:
        """The checkpoints to go on from, newest first; its own before those of ``source``."""
        own = published(self.checkpoints)
        return own or (candidates(self.source) if self.source is not None else [])


def run_place(job: Job, begun: Path | None = None) -> RunPlace:
    """Where ``job`` writes and what it goes on from, as ``run.folder`` and ``run.resume`` say.

    ``begun``: the folder that the launcher's first start of these ranks took; whatever is told, they go on in it.

    By itself a run goes on in the last of its folders, ``runs/<name>``, ``runs/<name>-2`` and so on, if that keeps
    checkpoints, and begins in the first free one if not. Raises RunRefused for a folder that already holds a run, or
    one whose run computes something else, CheckpointError for a checkpoint that cannot be gone on with.
    """
    place = _place(job.config.run, job.name, begun)
    if _by_itself(job, begun):
        _refuse_another_run(job, place)
    if place.found:
        folder, manifest = newest(place.found)
        check_size(folder, manifest.head, job.size, begin_anew(job) if _by_itself(job, begun) else "")
        if folder.parent != place.checkpoints and manifest.head.step >= job.config.training.steps:
            raise RunRefused(
                f"{folder} is a checkpoint of step {manifest.head.step}, and training.steps is "
                f"{job.config.training.steps}: nothing is left to train; raise training.steps"
            )
    return place


def check_data(job: Job, place: RunPlace, samples: Samples, begun: Path | None = None) -> None:
    """Raises RunRefused where ``job`` would by itself go on with ``samples`` that are not those of the checkpoint."""
    own = published(place.checkpoints)
    if own and _by_itself(job, begun):
        head = newest(own)[1].head
        if head.data and head.data != samples.digest:
            found = changes(head.config, job.config.model_dump(mode="json"))
            raise RunRefused(_refusal(job, place, head.step, [*(str(one) for one in found if one.is_of_data), DATA]))


def _refuse_another_run(job: Job, place: RunPlace) -> None:
    """Raises RunRefused where the folder of ``place`` holds a run that computes something else."""
    own, now = published(place.checkpoints), job.config.model_dump(mode="json")
    if own:
        folder, manifest = newest(own)
        check_size(folder, manifest.head, job.size, begin_anew(job))
        before, step = manifest.head.config, manifest.head.step
        differs: list[str] = []
    else:
        config = _begun_with(place.folder)
        if config is None:
            return
        before, step = config.model_dump(mode="json"), 0
        differs = size_differences(before["model"], job.size)
    found = list(changes(before, now))
    # Before there is a checkpoint nothing tells of the data but the run file.
    if differs or any(one.is_another_run or (step == 0 and one.is_of_data) for one in found):
        told = [str(one) for one in found if not one.is_of_length]
        raise RunRefused(_refusal(job, place, step, [*differs, *told]))


def _begun_with(folder: Path) -> JobConfig | None:
    """The run file of the run that ``folder`` holds; None where there is no run, or its file cannot be read."""
    try:
        return load(folder / RESOLVED).config if holds_run(folder) else None
    except ConfigError:
        return None


def _by_itself(job: Job, begun: Path | None) -> bool:
    """Whether neither the user nor an earlier start of these ranks has said what ``job`` goes on from. A restart count
    says nothing: ranks that were refused are started again too, and must be refused again."""
    return job.config.run.resume == "auto" and begun is None


def _refusal(job: Job, place: RunPlace, step: int, differs: Sequence[str]) -> str:
    """What ``differs`` from the run in the folder, saved at ``step`` (0: not yet), and the ways out."""
    run, saved = job.config.run, f"saved at step {step}" if step else "which has saved no checkpoint yet"
    lines = [f"{place.folder} holds another run, {saved}; what differs: {', '.join(differs)}", f"  {begin_anew(job)}"]
    if step:
        longer = f" with training.steps above {step}" if step >= job.config.training.steps else ""
        where = f", in {_next_free(job)}" if run.folder is None else ", in another run.folder"
        lines.append(f"  --resume {place.folder}{longer} goes on from it with the change{where}")
    if run.folder is None and (same := _same_run(job, place.folder)) is not None:
        lines.append(f"  run.folder={same} goes on with the run in {same}, of which nothing differs")
    return "\n".join(lines)


def _same_run(job: Job, last: Path) -> Path | None:
    """Of the job's folders before ``last`` the latest whose run computes the same."""
    now = job.config.model_dump(mode="json")
    for folder in reversed(list(takewhile(lambda one: one != last, folders_of(job.name)))):
        try:
            head = newest(published(folder / CHECKPOINTS) or [folder])[1].head
        except CheckpointError:
            continue
        alike = not size_differences(head.config["model"], job.size)
        if alike and all(one.is_of_length for one in changes(head.config, now)):
            return folder
    return None


def begin_anew(job: Job) -> str:
    """How a run of ``job`` would not go on with what is there."""
    if job.config.run.folder is not None:
        return "another run.folder begins anew"
    return f"--resume never begins anew in {_next_free(job)}, another run.folder in one of its own"


def _next_free(job: Job) -> Path:
    return run_folder(job.config.run, job.name, continues=False)


def _place(run: Run, name: str, begun: Path | None) -> RunPlace:
    source = _named_source(run)
    if begun is not None:
        return RunPlace(begun, source)
    # A world that the launcher has restarted goes on with what its first start began.
    continues = run.resume == "auto" or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder = run_folder(run, name, continues)
    if run.resume == "auto" and not published(folder / CHECKPOINTS):
        config = _begun_with(folder)
        if config is not None:
            source = _named_source(config.run)  # which the run was told as it began, and has not got beyond
    return RunPlace(folder, source)


def _named_source(run: Run) -> Path | None:
    return None if run.resume in ("auto", "never") else Path(run.resume)


def without_hf_folder(run_file: RunFile, begun: Path | None = None) -> tuple[RunFile, str]:
    """``run_file`` with the model of the checkpoint that it goes on from, where ``model.hf`` cannot be read any more.

    The weights come from the checkpoint anyway. Also says so, in words; ``run_file`` itself and nothing where there is
    nothing to mend, or no checkpoint to mend it with. Raises as ``run_place`` does.
    """
    model = run_file.config.model
    if model.hf is None or not all(run_file.is_sound(key) for key in ("model", "model.hf", "run")):
        return run_file, ""
    try:
        check_folder(run_file.path.parent / Path(model.hf).expanduser())
    except WeightsError as error:
        reason = error.reasons[0]
    else:
        return run_file, ""
    place = _place(run_file.config.run, run_file.path.stem, begun)
    if not place.found:
        return run_file, ""
    folder, manifest = newest(place.found)
    theirs = manifest.head.config
    named = str((run_file.path.parent / Path(model.hf).expanduser()).absolute())
    if run_file.config.run.resume == "auto" and is_another_folder(theirs["model"].get("hf"), named):
        return run_file, ""
    given = {name: value for name, value in model if value is not None and name != "hf"}
    config = run_file.config.model_copy(update={"model": Model(**{**theirs["model"], **given, "hf": None})})
    if not run_file.is_set("data.tokenizer"):  # the folder's own, if it had one
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"tokenizer": theirs["data"]["tokenizer"]})}
        )
    return replace(run_file, config=config), f"{reason}; going on without it, with the model of {folder}"


def finished(job: Job, place: RunPlace) -> int | None:
    """The step of the run's own newest checkpoint, if there is nothing left to train."""
    own = published(place.checkpoints)
    if not own:
        return None
    step = newest(own)[1].head.step
    return step if step >= job.config.training.steps else None
