"""One rank explained: where it sits, whom it talks to, what it holds and what it reads. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from math import prod
from typing import final

from koushi.errors import ConfigError, Problem
from koushi.job import Job
from koushi.layout import Shard, local_slices
from koushi.mesh import FOLDS
from koushi.models.llama.layout import EMBEDDING, OUTPUT, Parameter, canonical, parameters
from koushi.report.nodes import Nodes
from koushi.report.words import columns, ranks_text, span_text
from koushi.schedules import rank_of_stage, stages_of_rank
from koushi.units import count_text, counted


def rank_text(job: Job, rank: int, node_size: int = 8, names: Sequence[str] = (), step: int = 1) -> str:
    """``rank`` of ``job``, with its slices of the parameters ``names`` (none: a few that stand for the rest) and the
    samples it reads in ``step``, counted from 1.

    Raises ConfigError for a rank, a parameter or a step that is not there.
    """
    _require(job, rank, step)
    asked = [_named(job, name) for name in names]
    view = RankView(job, rank)
    node, device = divmod(rank, node_size)
    lines = [
        f"{job.name}: rank {rank} of {job.mesh.world_size}, device {device} of node {node}",
        f"coordinate  {', '.join(f'{name}={index}' for name, index in view.coordinate.items())}",
        "",
        *_groups(view, Nodes(job.mesh, node_size)),
        "",
        *_stages(view),
        "",
        *_samples(view, step),
        "",
        *_parameters(view, asked),
    ]
    return "\n".join(lines)


@final
class RankView:
    """What the parts of the text ask of a rank."""

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.rank = rank
        self.coordinate = job.mesh.coordinate(rank)
        self.schedule = job.config.parallelism.pipeline_parallel_schedule
        self.pp = job.mesh.degree("pp")
        self.parameters = parameters(job.size, job.mesh.degree("tp"))
        self.stages = stages_of_rank(self.schedule, self.pp, len(job.stages), self.pp_index)
        """The stages that the rank holds, first to last."""

    @property
    def pp_index(self) -> int:
        return self.coordinate["pp"]

    def holder(self, stage: int) -> int:
        """The rank that holds ``stage`` and has this rank's other coordinates."""
        index = rank_of_stage(self.schedule, self.pp, len(self.job.stages), stage)
        return self.job.mesh.rank({**self.coordinate, "pp": index})

    def stages_with(self, name: str) -> tuple[int, ...]:
        """The stages that a parameter is on: one, or both ends for an embedding that is tied across stages."""
        last = len(self.job.stages) - 1
        if name == EMBEDDING:
            return (0, last) if self.job.size.tie_embeddings and last > 0 else (0,)
        if layer := re.match(r"layers\.(\d+)\.", name):
            return tuple(stage for stage, layers in enumerate(self.job.stages) if int(layer[1]) in layers)
        return (last,)

    def holds(self, name: str) -> bool:
        return any(stage in self.stages for stage in self.stages_with(name))

    def slices(self, parameter: Parameter) -> tuple[slice, ...]:
        degrees = dict(zip(self.job.mesh.names, self.job.mesh.shape, strict=True))
        return local_slices(parameter.shape, parameter.cuts, degrees, self.coordinate)

    def copies(self, parameter: Parameter) -> tuple[int, ...]:
        """The ranks of this rank's stages that hold the same slice, itself among them."""
        cut = {one.mesh_dim for one in parameter.cuts if isinstance(one.placement, Shard)}
        return self.job.mesh.group(self.rank, *(name for name in self.job.mesh.names if name not in cut | {"pp"}))


def _require(job: Job, rank: int, step: int) -> None:
    problems = []
    if not 0 <= rank < job.mesh.world_size:
        legal = f"0 to {job.mesh.world_size - 1}" if job.mesh.world_size > 1 else "0"
        what = f"there is no such rank in a world of {job.mesh.world_size}"
        problems.append(Problem(f"command line (--rank {rank})", "", what, legal))
    steps = job.config.training.steps
    if not 1 <= step <= steps:
        problems.append(Problem(f"command line (--step {step})", "", "the run has no such step", f"1 to {steps}"))
    if problems:
        raise ConfigError(problems)


def _named(job: Job, name: str) -> str:
    """The stored name that ``name`` means; ``.weight`` may be left out. Raises ConfigError with the nearest."""
    known = parameters(job.size)
    for spelling in (name, f"{name}.weight"):
        stored = canonical(spelling, job.size)
        if stored in known:
            return stored
    layer = re.match(r"layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= job.size.n_layers:
        legal = f"layers 0 to {job.size.n_layers - 1}"
    else:
        endings = [one for one in known if one.removesuffix(".weight").endswith("." + name.removesuffix(".weight"))]
        close = endings[:1] or get_close_matches(name, known, n=1, cutoff=0.5)
        legal = f"did you mean {close[0]}?" if close else f"such as {EMBEDDING} or layers.0.attention.wq.weight"
    raise ConfigError([Problem(f"command line (--parameter {name})", "", "the model has no such parameter", legal)])


def _groups(view: RankView, nodes: Nodes) -> list[str]:
    mesh = view.job.mesh
    rows = [("group", "index", "degree", "link", "ranks")]
    for name, dims in [*((name, (name,)) for name in mesh.names), *FOLDS.items()]:
        group = mesh.group(view.rank, *dims)
        link = "none"
        if len(group) > 1:
            reached = len({rank // nodes.size for rank in group})
            link = "inside a node" if reached == 1 else f"across {reached} nodes"
        label = name if dims == (name,) else f"{name} ({' × '.join(dims)})"
        rows.append((label, str(group.index(view.rank)), str(len(group)), link, ranks_text(group)))
    return columns(rows, indent="")


def _stages(view: RankView) -> list[str]:
    job = view.job
    last = len(job.stages) - 1
    if last == 0:
        return [f"pipeline    none: every rank has all {counted(job.size.n_layers, 'layer')}"]
    lines = [f"pipeline    {view.schedule}, {last + 1} stages over {view.pp} ranks"]
    for stage in view.stages:
        lines.append(f"  stage {stage}  {_stage_parts(view, stage)}")
        indent = " " * len(f"  stage {stage}  ")
        if stage > 0:
            lines.append(indent + _neighbour(view, stage - 1, "from", "to"))
        if stage < last:
            lines.append(indent + _neighbour(view, stage + 1, "to", "from"))
    if job.size.tie_embeddings and view.holds(EMBEDDING):
        ends = sorted({view.holder(0), view.holder(last)} - {view.rank})
        if ends:
            lines.append(f"  the embedding is tied across stages: its gradient is added up with rank {ends[0]}")
    return lines


def _stage_parts(view: RankView, stage: int) -> str:
    layers, size = view.job.stages[stage], view.job.size
    parts = [f"layers {span_text(layers.start, layers.stop)}" if len(layers) > 1 else f"layer {layers.start}"]
    if not layers:
        parts = ["no layers"]
    if stage == 0:
        parts.insert(0, "the embedding")
    if stage == len(view.job.stages) - 1:
        parts.append("the last norm and the output" + (" (tied)" if size.tie_embeddings else ""))
    return ", ".join(parts)


def _neighbour(view: RankView, stage: int, way: str, back: str) -> str:
    other = view.holder(stage)
    if other == view.rank:
        return f"activations {way} stage {stage}, on this rank: no message"
    return f"activations {way} stage {stage} on rank {other}, their gradients {back} it"


def _samples(view: RankView, step: int) -> list[str]:
    job, mesh = view.job, view.job.mesh
    training = job.config.training
    index, ways, local = mesh.index(view.rank, *FOLDS["data"]), mesh.degree(*FOLDS["data"]), job.local_batch_size
    first = index * local
    start = (step - 1) * training.global_batch_size + first
    microbatches = f"{counted(job.microbatches, 'microbatch')} of {training.microbatch_size}"
    lines = [
        f"samples     {span_text(first, first + local)} of the {training.global_batch_size} of every step, in "
        f"{microbatches} (index {index} of {ways} along the data fold)",
        f"  in step {step} samples {span_text(start, start + local)} of the run, counted from 0; "
        "what sample i holds depends on the seed alone",
    ]
    others = tuple(name for name in mesh.names if name not in FOLDS["data"])
    same = [rank for rank in mesh.group(view.rank, *others) if rank != view.rank]
    if same:
        lines.append(f"  the same samples go to rank{'s' if len(same) > 1 else ''} {ranks_text(tuple(same))}")
    tp = mesh.degree("tp")
    if tp > 1:
        part = training.seq_len // tp
        at = view.coordinate["tp"] * part
        lines.append(
            f"  between attention and feed-forward it keeps tokens {span_text(at, at + part)} of each sample's "
            f"{training.seq_len} (sequence parallel over tp)"
        )
    return lines


def _parameters(view: RankView, names: list[str]) -> list[str]:
    held = {name: one for name, one in view.parameters.items() if view.holds(name)}
    total = sum(prod(one.shape) for one in view.parameters.values())
    mine = sum(prod(part.stop - part.start for part in view.slices(one)) for one in held.values())
    lines = [f"parameters  {count_text(mine)} of {count_text(total)} numbers ({100 * mine / total:.3g}%)"]
    rows = [("", "whole", "here", "which", "the same on ranks")]
    elsewhere = []
    for name in names or _representative(view):
        parameter = view.parameters[name]
        if not view.holds(name):
            (stage, *_) = view.stages_with(name)
            elsewhere.append(f"  {name} is on stage {stage}: rank {view.holder(stage)} holds what this rank would")
            continue
        slices = view.slices(parameter)
        here = [part.stop - part.start for part in slices]
        copies = tuple(rank for rank in view.copies(parameter) if rank != view.rank)
        rows.append((name, _shape(parameter.shape), _shape(here), _which(parameter, slices), ranks_text(copies) or "-"))
    if len(rows) > 1:
        lines += columns(rows)
    if not names:
        layers = sum(len(view.job.stages[stage]) for stage in view.stages)
        if layers > 1:
            lines.append(f"  and so on for {counted(layers - 1, 'more layer')}")
    return lines + elsewhere


def _representative(view: RankView) -> list[str]:
    """The ends that the rank holds and its first layer."""
    layers = [layer for stage in view.stages for layer in view.job.stages[stage]]
    shown = [EMBEDDING, "norm.weight", OUTPUT]
    if layers:
        shown += [name for name in view.parameters if name.startswith(f"layers.{layers[0]}.")]
    return [name for name in view.parameters if name in shown and view.holds(name)]


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _which(parameter: Parameter, slices: tuple[slice, ...]) -> str:
    """Rows and columns of a slice in words."""
    if any(part.stop == part.start for part in slices):
        return "nothing: fewer rows than ranks"
    words = ("rows", "columns") if len(slices) == 2 else ("numbers",)
    texts = [
        f"{word} {span_text(part.start, part.stop)}"
        for word, part, size in zip(words, slices, parameter.shape, strict=True)
        if part != slice(0, size)
    ]
    return ", ".join(texts) or "all"
