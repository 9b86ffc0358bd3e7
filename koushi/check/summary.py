"""A checked job on one screen."""

from __future__ import annotations

from math import prod

from koushi.errors import TrainingError
from koushi.job import Job
from koushi.models.llama.layout import parameters
from koushi.run_folder import holds_run, run_folder
from koushi.units import count_text, counted, cut_short

_SHOWN = 8


def summary(job: Job, follows: bool = False) -> str:
    """Model, mesh with the ranks of one group per dim, stages, batch; ``follows``: whether dp_shard follows --gpus."""
    lines = [f"{job.name}: no problems found", *_model(job), *_mesh(job, follows), *_stages(job), *_batch(job)]
    return "\n".join(lines)


def _model(job: Job) -> list[str]:
    size = job.size
    count = sum(prod(parameter.shape) for parameter in parameters(size).values())
    tied = ", tied embeddings" if size.tie_embeddings else ""
    text = (
        f"model    {job.model_name}, {count_text(count)} parameters: {size.n_layers} layers, dim {size.dim}, "
        f"{size.n_heads} heads, {size.n_kv_heads} KV heads, ffn_dim {size.ffn_dim}, vocab_size {size.vocab_size}{tied}"
    )
    return [text]


def _mesh(job: Job, follows: bool) -> list[str]:
    told = "; dp_shard follows --gpus" if follows else ""
    lines = [f"mesh     {job.mesh}, {counted(job.mesh.world_size, 'device')}{told}; the groups of rank 0:"]
    for name, degree in zip(job.mesh.names, job.mesh.shape, strict=True):
        lines.append(f"           {name:<13}{degree:>6}   {cut_short(job.mesh.group(0, name), _SHOWN)}")
    folded = job.mesh.group(0, "dp_replicate", "dp_shard")
    lines.append(f"           {'both dp':<13}{len(folded):>6}   {cut_short(folded, _SHOWN)}")
    return lines


def _stages(job: Job) -> list[str]:
    parallelism = job.config.parallelism
    if len(job.stages) == 1:
        return [f"stages   1, {job.size.n_layers} layers"]
    counts = [_span(stage) for stage in job.stages[:_SHOWN]]
    if len(job.stages) > _SHOWN:
        counts.append(f"... {_span(job.stages[-1])}")
    text = (
        f"stages   {len(job.stages)}, {parallelism.pipeline_parallel_schedule}, "
        f"{job.stages_per_rank} per rank; layers {' | '.join(counts)}"
    )
    return [text]


def _batch(job: Job) -> list[str]:
    training = job.config.training
    split = job.mesh.degree("dp_replicate", "dp_shard")
    tokens = training.global_batch_size * training.seq_len
    batch = (
        f"batch    {training.global_batch_size} samples = {counted(split, 'data-parallel rank')} "
        f"x {counted(job.microbatches, 'microbatch')} x {training.microbatch_size}; {count_text(tokens)} tokens a step"
    )
    total = count_text(tokens * training.steps)
    precision = job.config.precision
    return [
        batch,
        f"dtypes   {precision.parameters} parameters, {precision.compute} compute, {precision.reduce} gradient "
        f"reductions; recompute {training.recompute}",
        f"run      {training.steps} steps, {total} tokens, {_folder(job)}",
    ]


def _folder(job: Job) -> str:
    """Where ``koushi train`` would write, were it started here and now."""
    run = job.config.run
    try:
        folder = run_folder(run, job.name, continues=run.resume == "auto")
    except TrainingError as error:
        return f"which would not start: {error}"
    return f"into {folder}" + (", with what is there already" if holds_run(folder) else "")


def _span(stage: range) -> str:
    if not stage:
        return "none"
    return f"{stage[0]}-{stage[-1]}" if len(stage) > 1 else f"{stage[0]}"
