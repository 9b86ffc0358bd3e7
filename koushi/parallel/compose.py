"""Composition: the only place that sees the world mesh.

Inside each pipeline stage the order is tensor parallel, precision, recompute, compile, data parallel.
Each technique is handed its own sub-mesh and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from koushi.checkpoint.fill import fill_from
from koushi.checkpoint.hf import HfWeights
from koushi.config.schema import JobConfig, Training
from koushi.job import Job
from koushi.layout import Replicate
from koushi.loss import token_loss_sum
from koushi.models.llama import layout as llama
from koushi.models.llama.model import Llama
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import compile, data, pipeline, precision, recompute, tensor
from koushi.parallel.device_mesh import ParallelDims
from koushi.parallel.precision import DTYPES
from koushi.parallel.shards import LocalParameter, fill, local_parameters
from koushi.schedules import stage_layers, stages_of_rank, tied_ends


def tensor_parallel_options(size: LlamaSize, tp: int, index: int) -> tensor.TensorParallel:
    """What tensor parallel needs to know of a Llama on the rank at ``index`` of tp."""
    placements = {
        name: parameter.tp for name, parameter in llama.parameters(replace(size, tie_embeddings=False), tp).items()
    }
    copied: dict[str, slice] = {}
    if isinstance(llama.kv_placement(size, tp), Replicate):
        head = index * size.n_kv_heads // tp
        rows = slice(head * size.head_dim, (head + 1) * size.head_dim)
        copied = {name: rows for name in placements if name.endswith(("wk.weight", "wv.weight"))}
    return tensor.TensorParallel(placements, llama.REGIONS, copied)


def parallelize_part(part: Llama, world_mesh: DeviceMesh, dims: ParallelDims, config: JobConfig) -> Llama:
    """Apply every technique but pipeline parallel to one stage, in place."""
    compute = DTYPES[config.precision.compute]
    if dims.tp > 1:
        submesh = world_mesh["tp"]
        tensor.apply(part, submesh, tensor_parallel_options(part.size, dims.tp, submesh.get_local_rank()))
    precision.apply(part, compute)
    for block in part.layers.values():
        recompute_and_compile(block, config.training)
    if dims.dp_replicate * dims.dp_shard > 1:
        submesh = world_mesh["dp_replicate", "dp_shard"] if dims.dp_replicate > 1 else world_mesh["dp_shard"]
        reshard = config.parallelism.reshard_after_forward
        options = data.DataParallel(
            compute=compute,
            reduce=DTYPES[config.precision.reduce],
            reshard_after_forward=reshard == "always" or (reshard == "auto" and dims.pp == 1),
        )
        data.apply(part, submesh, options, _gathered_alone(part))
    return part


def recompute_and_compile(block: nn.Module, options: Training) -> None:
    """In the order that suits: what is made again in full is compiled by itself, as a compiled block made again as a
    whole fails where its parameters are DTensors (docs/log.md); what selective recompute keeps is chosen among the
    operations that are compiled."""
    if options.compile and options.recompute == "full":
        compile.apply(block)
    recompute.apply(block, options.recompute)
    if options.compile and options.recompute != "full":
        compile.apply(block)


def _gathered_alone(part: Llama) -> list[nn.Module]:
    """What data parallel gathers and frees on its own: blocks, and an embedding that shares nothing."""
    units: list[nn.Module] = list(part.layers.values())
    if part.tok_embeddings is not None and (part.output is None or not part.size.tie_embeddings):
        units.insert(0, part.tok_embeddings)
    return units


def parallelize_llama(
    model: Llama, world_mesh: DeviceMesh, parallel_dims: ParallelDims, job_config: JobConfig
) -> dict[int, Llama]:
    """Cut ``model`` over ``world_mesh``, each technique on its own sub-mesh.

    Returns this rank's stages by index, first to last: ``{0: model}`` without pipeline parallel. The
    model may be on the meta device; parameters that hold values keep them.
    """
    parallelism = job_config.parallelism
    if parallel_dims.pp == 1:
        return {0: parallelize_part(model, world_mesh, parallel_dims, job_config)}
    stages = stage_layers(model.size.n_layers, parallel_dims.pp, parallelism)
    held = stages_of_rank(
        parallelism.pipeline_parallel_schedule, parallel_dims.pp, len(stages), world_mesh["pp"].get_local_rank()
    )
    parts = {
        stage: model.part(stages[stage], first=stage == 0, last=stage == len(stages) - 1) for stage in sorted(held)
    }
    return {stage: parallelize_part(part, world_mesh, parallel_dims, job_config) for stage, part in parts.items()}


class GlobalLoss:
    """The loss of a microbatch as its share of the global batch's mean.

    ``total``, the valid tokens of the whole global batch, is set before the first forward of a step; a
    batch without any has a loss of 0.
    """

    def __init__(self, tp: DeviceMesh | None):
        self._tp = tp
        self.total = torch.ones((), dtype=torch.int64)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._tp is None:
            return token_loss_sum(logits, labels) / self.total.clamp(min=1)
        return tensor.token_loss_sum(logits, labels, self._tp) / self.total.clamp(min=1)


@dataclass(frozen=True)
class ParallelModel:
    """A model on the lattice, as this rank holds it."""

    parts: dict[int, Llama]
    """This rank's stages by index."""
    parameters: list[LocalParameter]
    loss: GlobalLoss
    schedule: pipeline.Schedule | None
    """None without pipeline parallel."""
    groups: dict[str, dist.ProcessGroup]
    """This rank's group of every mesh dim with a degree above 1."""
    tied_ends: tuple[int, int] | None
    """Pipeline coordinates that hold the two ends of a tied embedding; None where one part holds both."""


def build(job: Job, world_mesh: DeviceMesh, device: torch.device) -> ParallelModel:
    """The job's model on ``world_mesh``, with its initial weights: drawn, or those of ``model.hf``.

    On the meta device it has shapes and no weights.
    """
    config, mesh = job.config, job.mesh
    with torch.device("meta"):
        model = Llama(job.size, config.training.seq_len).to(DTYPES[config.precision.parameters])
    parts = parallelize_llama(model, world_mesh, ParallelDims.of(mesh), config)
    for part in parts.values():
        part.to_empty(device=device)
        part.tie()
    parameters = local_parameters(parts, job, mesh.coordinate(dist.get_rank()))
    if device.type != "meta":  # where a dry run builds, there is nothing to fill
        _set_initial(parameters, config)
    loss = GlobalLoss(world_mesh["tp"] if mesh.degree("tp") > 1 else None)
    schedule = None
    if mesh.degree("pp") > 1:
        schedule = pipeline.apply(parts, world_mesh["pp"], pipeline_options(job, device), loss)
    groups = {name: world_mesh[name].get_group() for name in mesh.names if mesh.degree(name) > 1}
    shape = (config.parallelism.pipeline_parallel_schedule, mesh.degree("pp"), len(job.stages))
    ends = tied_ends(*shape, tied=job.size.tie_embeddings)
    return ParallelModel(parts, parameters, loss, schedule, groups, ends)


def _set_initial(parameters: list[LocalParameter], config: JobConfig) -> None:
    if config.model.hf is None:
        fill(parameters, config.training.seed)
        return
    with HfWeights(Path(config.model.hf)) as weights:
        fill_from(weights, parameters)


def pipeline_options(job: Job, device: torch.device) -> pipeline.Pipeline:
    training, tp = job.config.training, job.mesh.degree("tp")
    samples, tokens = training.microbatch_size, training.seq_len
    return pipeline.Pipeline(
        schedule=job.config.parallelism.pipeline_parallel_schedule,
        n_stages=len(job.stages),
        microbatches=job.microbatches,
        tokens=(samples, tokens),
        activations=(samples, tokens // tp, job.size.dim),
        logits=(samples, tokens, job.size.vocab_size // tp),
        compute=DTYPES[job.config.precision.compute],
        device=device,
    )
