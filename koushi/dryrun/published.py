"""Published runs of FSDP as jobs of Koushi, and what their ranks hold at the fullest moment of a dry run.

Three things stand in for Koushi's own where a run had them: heads of a width of their own, torchtitan's selective
recompute, which keeps every other matmul, and torch's ``loss_parallel``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from koushi.accuracy.published import Run
from koushi.accuracy.rows import Row
from koushi.config.schema import JobConfig, Model, Parallelism, Precision, Training
from koushi.data.samples import IGNORE_INDEX
from koushi.dryrun.memory import Peak
from koushi.dryrun.trace import trace
from koushi.job import Job
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import recompute, tensor
from koushi.parallel.recomputed import Contexts
from koushi.plan.memory import every_rank
from koushi.plan.workload import System, Transformer, Workload, koushis, of_job
from koushi.schedules import layer_ranges

EVERY_OTHER = 0.5
"""``System.kept_matmuls`` of torchtitan's selective recompute."""

NOT_KOUSHIS: tuple[tuple[str, Callable[[Workload], bool]], ...] = (
    ("no Llama", lambda workload: _plain(workload.model) != workload.model),
    ("float8", lambda workload: workload.system.float8),
    ("another FSDP than fully_shard (SimpleFSDP, a traced graph)", lambda workload: not workload.system.own_streams),
    ("a loss in pieces", lambda workload: workload.system.loss_chunks > 1),
    ("a compiled loss", lambda workload: workload.system.compiled_loss),
    ("context parallel", lambda workload: workload.mesh.degree("cp") > 1),
    ("only some blocks recompute", lambda workload: workload.system.recompute_share < 1),
    ("no fused attention", lambda workload: not workload.system.flash_attention),
    ("a system that keeps its state otherwise", lambda workload: _own_ways(workload) != koushis()),
)
"""Why Koushi's code cannot run what a run ran, the first that holds."""


def is_fsdp(row: Row) -> bool:
    """Whether a row is of the FSDP family, and states its memory."""
    return row.zero_stage in (2, 3) and row.memory_gib is not None


@dataclass(frozen=True)
class HeadsOfWidth(LlamaSize):
    """A Llama whose heads have a width of their own, as Qwen3's have."""

    width: int = 0

    @property
    def head_dim(self) -> int:
        return self.width


@dataclass(frozen=True)
class Likeness:
    """A job that runs what a published run ran; the same for runs that ran the same."""

    job: Job
    every_other_matmul: bool
    """Whether torchtitan's selective recompute stands in for Koushi's."""
    torchs_loss: bool
    """Whether torch's loss stands in for Koushi's."""


def likeness(run: Run) -> Likeness | str:
    """The job for ``run``, not compiled, or why there is none."""
    workload, system = run.workload, run.workload.system
    if run.memory_gib is None:
        return run.spoiled or "its memory is in doubt"
    for reason, holds in NOT_KOUSHIS:
        if holds(workload):
            return reason
    job = Job(
        config=_config(workload),
        size=_size(workload.model),
        mesh=workload.mesh,
        stages=layer_ranges(workload.stage_layers),
        name="published",
        base=Path(),
    )
    assert of_job(job) == replace(workload, system=koushis()), "a job of another workload"
    return Likeness(
        job,
        every_other_matmul=workload.recompute == "selective" and system.kept_matmuls == EVERY_OTHER,
        torchs_loss=system.distributed_loss and workload.mesh.degree("tp") > 1,
    )


def peak_of(like: Likeness) -> Peak:
    """Of the rank that the planner says is the fullest, in this process, which can then be no other rank."""
    memories = every_rank(of_job(like.job))
    fullest = max(range(len(memories)), key=lambda pp: memories[pp].active)
    with ExitStack() as stack:
        if like.every_other_matmul:
            stack.enter_context(patch.object(recompute, "contexts", every_other))
        if like.torchs_loss:
            stack.enter_context(patch.object(tensor, "token_loss_sum", torchs_loss_sum))
            stack.enter_context(loss_parallel())
        return trace(like.job, like.job.mesh.rank({"pp": fullest}), "cuda").peak


def torchs_loss_sum(logits: Tensor, labels: Tensor, submesh: DeviceMesh) -> Tensor:
    """As ``koushi.parallel.tensor.token_loss_sum``, by torch's cross entropy of logits that are a DTensor."""
    whole = DTensor.from_local(logits.flatten(0, 1), submesh, [Shard(1)], run_check=False)
    loss: Tensor = F.cross_entropy(whole.float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    assert isinstance(loss, DTensor), "loss_parallel is on"
    return loss.to_local()


def every_other(mode: str) -> Contexts:
    """In the place of Koushi's contexts: all outputs that it may keep, but of matmuls the first, the third, ..."""
    assert mode == "selective", "what is made again in full keeps nothing"
    matmuls: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation == torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            if matmuls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return recompute.policy(context, operation)

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, again


def _plain(model: Transformer) -> Transformer:
    return replace(model, gated=True, biases=False, layer_norm=False, learned_positions=0)


def _own_ways(workload: Workload) -> System:
    """The system without what changes no memory of a run that Koushi can run, or has a stand-in."""
    kept = workload.system.kept_matmuls
    return replace(
        workload.system,
        attention_kernel="flash2",
        distributed_loss=False,
        expandable_segments=True,
        fused=False,
        gathers_float8=False,
        keeps_every_output=False,
        overlap_data_parallel=True,
        overlap_tensor_parallel=False,
        kept_matmuls=1.0 if workload.recompute != "selective" or kept == EVERY_OTHER else kept,
    )


def _size(model: Transformer) -> HeadsOfWidth:
    return HeadsOfWidth(
        vocab_size=model.vocab_size,
        dim=model.dim,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        ffn_dim=model.ffn_dim,
        tie_embeddings=model.tie_embeddings,
        width=model.head_dim,
    )


def _config(workload: Workload) -> JobConfig:
    mesh, pipelined = workload.mesh, workload.mesh.degree("pp") > 1
    return JobConfig(
        model=Model(n_layers=workload.model.n_layers),
        parallelism=Parallelism(
            pipeline_parallel_degree=mesh.degree("pp"),
            data_parallel_replicate_degree=mesh.degree("dp_replicate"),
            data_parallel_shard_degree=mesh.degree("dp_shard"),
            tensor_parallel_degree=mesh.degree("tp"),
            pipeline_parallel_schedule=workload.schedule,  # type: ignore[arg-type]
            pipeline_parallel_stages_per_rank=workload.stages_per_rank,
            pipeline_parallel_layers_per_stage=workload.stage_layers if pipelined else None,
            reshard_after_forward="always" if workload.reshard_after_forward else "never",
        ),
        training=Training(
            seq_len=workload.seq_len,
            global_batch_size=workload.global_batch_size,
            microbatch_size=workload.microbatch_size,
            recompute=workload.recompute,
        ),
        precision=Precision(
            parameters=workload.parameters,  # type: ignore[arg-type]
            compute=workload.compute,  # type: ignore[arg-type]
            reduce=workload.reduce,  # type: ignore[arg-type]
        ),
    )
