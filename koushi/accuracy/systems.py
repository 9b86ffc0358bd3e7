"""How each training system behind the published runs keeps its state and overlaps its work. No torch.

One description per system, not per source. Where each fact comes from stands in data/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from koushi.accuracy.rows import Row
from koushi.plan.workload import Recompute, System

MeasuredMemory = Literal["active", "reserved", "device"]


@dataclass(frozen=True)
class Described:
    """What a system adds to a row."""

    system: System
    compute: str
    reduce: str
    recompute: Recompute
    reshard_after_forward: bool = True


def measured_memory(row: Row) -> MeasuredMemory:
    """Which of the planner's totals the row's memory is. torchtitan, torchao and NeMo print the most that torch's
    allocator reserved; nanotron prints that and what was allocated, and its rows don't say which: reserved."""
    notes = row.notes.lower()
    if "nvidia-smi" in notes:
        return "device"
    return "active" if "max allocated" in notes or "max_memory_allocated" in notes else "reserved"


def measured_first(row: Row) -> bool:
    """Whether a row's memory is rank 0's, and so the first stage's: nanotron's table is written by that rank
    (``log_throughput`` in ``logging/``). Else the fullest's is meant."""
    return name_of(row) == "nanotron"


def describe(row: Row) -> Described:
    """By the source's name, then by what the notes name, then by the ZeRO stage."""
    return _modes(row, SYSTEMS[name_of(row)](row))


def name_of(row: Row) -> str:
    for start, name in SOURCES.items():
        if row.source.startswith(start):
            if name == "megatron-lm" and row.zero_stage == 3:
                return "deepspeed-3"
            return name
    notes = row.notes.lower()
    if row.zero_stage in (2, 3) or "fsdp" in notes:
        return "torchtitan" if "fsdp2" in notes or "torchtitan" in notes else "fsdp1"
    return "megatron-lm" if row.date and row.date < "2023" else "megatron-core"


def _half(row: Row) -> str:
    return "float16" if row.precision.startswith("fp16") else "bfloat16"


def _cut_sequence(row: Row, otherwise: bool) -> bool:
    return otherwise if row.sequence_parallel is None else row.sequence_parallel


COMPILED_LOSS = "2025-05"
"""Since about then torchtitan compiles the loss with the model (``components/loss.py``)."""
CUDNN_FIRST = "2025-10"
"""Since about then torchtitan's ``models/attention.py`` asks for cuDNN's attention before FlashAttention-2."""


WHOLE_GRAPH = ("graph_trainer", "_inductor")
"""Words of the notes: torchtitan's graph_trainer, which traces forward, loss and backward into one graph."""
LOSS_BY_HEAD = "2026-04"
"""Since then torchtitan's loss in pieces takes the output projection of each by itself (its pull request 2937); before,
it cut logits that were there whole (996)."""


def _traced(row: Row) -> bool:
    """Whether a compiler has forward and backward as graphs: they keep nothing that backward doesn't read."""
    return "SimpleFSDP" in row.notes or any(word in row.notes for word in WHOLE_GRAPH)


def _torchtitan(row: Row) -> Described:
    float8 = row.precision.startswith(("fp8", "mxfp8"))
    system = System(fused=bool(row.compiled) or float8, overlap_tensor_parallel="asynctp" in row.notes.lower())
    # With one scale for a tensor, weights are gathered as they are multiplied.
    tensorwise = row.precision == "fp8-tensorwise"
    if row.date >= CUDNN_FIRST:
        system = replace(system, attention_kernel="flash3")
    system = replace(
        system,
        sequence_parallel=_cut_sequence(row, True),
        gathers_float8=tensorwise,
        distributed_loss=True,
        expandable_segments=True,
    )
    if _traced(row):
        system = replace(system, own_streams=False)
    elif row.compiled and row.date >= COMPILED_LOSS:
        system = replace(system, compiled_loss=True)
    # Selective is torchtitan's default where a row says nothing.
    recompute: Recompute = "selective" if row.recompute == "" else "none"
    return Described(system, "bfloat16", "float32", recompute, row.zero_stage != 2)


def _fsdp1(row: Row) -> Described:
    """torch's FullyShardedDataParallel: float32 shards, gradients reduced in float32 only where mixed by default."""
    reduce = "float32" if row.precision.endswith("-amp") else "bfloat16"
    # llm-foundry's benchmarks ran Triton's kernel.
    system = System(attention_kernel="flash1" if row.source.startswith("llm-foundry") else "flash2")
    return Described(system, "bfloat16", reduce, "none", row.zero_stage != 2)


def _zero1(row: Row, system: System) -> System:
    return replace(
        system,
        buffers_every_microbatch=False,
        sharding="none" if row.zero_stage == 0 else "optimizer",
        separate_masters=True,
    )


NANOTRON_OPERATIONS = 285.0
"""Read off its runs with tp 2, 4 and 8 and one sample at a time: 4.4 ms per block whatever the model's size."""


def _nanotron(row: Row) -> Described:
    system = System(
        sequence_parallel=_cut_sequence(row, True),
        sequence_first=True,
        blocking_sends=True,
        gradients_at_once=False,
        # DDP's buckets, in bfloat16.
        copies=2.0 if (row.dp_replicate or 1) * (row.dp_shard or 1) > 1 else 0.0,
        fused_projections=True,
        keeps_gathered=False,
        gathers_beside=True,
        overlap_data_parallel=row.zero_stage == 0,
        gathers_update="at_once",
        host_operations=NANOTRON_OPERATIONS,
        softmax_loss=True,
    )
    return Described(_zero1(row, system), "bfloat16", "float32", "none")


MEGATRON_DEEPSPEED_OPERATIONS = 150.0
"""By the source's own pair of runs with and without waiting for every kernel, which are no rows here: 91.0 against
97.2 TFLOP/s on 80 devices, 3.5 ms per block and microbatch over its three passes."""


DEEPSPEED_BUCKETS = 2 * 500_000_000 * 2
"""DeepSpeed's default reduce_bucket_size and allgather_bucket_size, in elements of 2 bytes."""
EAGER_KERNELS = (1573 - 600) << 20
"""Bytes: before CUDA loaded kernels as they are used (11.7), the source measured a context of 1573 MiB, where the
planner counts 600."""
DEEPSPEED_FLAT = 6.0
"""Bytes: ZeRO-1's update copies a rank's gradients to float32 (4) and flattens them before (2)."""


def _megatron_deepspeed(row: Row) -> Described:
    system = System(
        blocking_launches=True,
        other_bytes=DEEPSPEED_BUCKETS + EAGER_KERNELS,
        host_operations=MEGATRON_DEEPSPEED_OPERATIONS,
        stops_early=False,
        blocking_sends=True,
        cut_sends=True,
        sequence_parallel=_cut_sequence(row, False),
        flash_attention=False,
        fused=True,
        fused_projections=True,
        overlap_data_parallel=False,
    )
    if _half(row) == "bfloat16" and "fp32 grad" in row.notes:
        # BF16_Optimizer adds gradients up in float32 and zeroes, not frees, those in bfloat16; parameters are laid out
        # flat on the device, beside those that they come from.
        return Described(_zero1(row, replace(system, copies=4.0)), "bfloat16", "float32", "none")
    system = replace(system, flat_update=DEEPSPEED_FLAT)
    return Described(_zero1(row, system), _half(row), _half(row), "none")


def _internevo(row: Row) -> Described:
    system = System(
        sequence_parallel=_cut_sequence(row, False),
        attention_kernel="flash1",
        fused_projections=True,
        # Not ``fused``: norms and rotation alone are. Its checkpoint is the reentrant one.
        stops_early=False,
        hybrid=True,
        gathers_update="by_owner",
    )
    return Described(_zero1(row, system), "bfloat16", "bfloat16", "none")


def _megatron_lm(row: Row) -> Described:
    """2021 and 2022: no distributed optimizer, no fused attention, gradients reduced after the last backward."""
    system = System(
        sequence_parallel=_cut_sequence(row, False),
        sequence_first=True,
        blocking_sends=True,
        cut_sends=True,
        buffers_every_microbatch=False,
        stops_early=False,
        keeps_gathered=False,
        sharding="none" if row.zero_stage is None else "optimizer",
        separate_masters=True,
        flash_attention=False,
        fused=True,
        fused_projections=True,
        overlap_data_parallel=False,
    )
    return Described(system, _half(row), _half(row), "none")


def _deepspeed_3(row: Row) -> Described:
    system = System(flash_attention=False, fused=True, sequence_parallel=False, stops_early=False)
    return Described(system, _half(row), _half(row), "none")


def _megatron_core(row: Row) -> Described:
    system = System(
        sequence_parallel=_cut_sequence(row, True),
        keeps_gathered=False,
        stops_early=False,
        attention_kernel="flash3",
        newest_libraries=True,
        sequence_first=True,
        fused=True,
        fused_projections=True,
        overlap_tensor_parallel=True,
    )
    if not row.dp_shard or row.dp_shard == 1:
        system = replace(system, sharding="optimizer", separate_masters=True, buffers_every_microbatch=False)
    return Described(system, "bfloat16", "bfloat16", "none")


def _aleph(row: Row) -> Described:
    """Aleph Alpha's own trainer (arXiv 2311.05610): Megatron's layout, ZeRO-1, kernels named run by run."""
    notes = row.notes.lower()
    system = System(
        sequence_parallel=_cut_sequence(row, False),
        stops_early=False,
        flash_attention="flash" in notes or "kernel" not in notes,
        attention_kernel="flash1" if "1.0" in notes else "flash2",
        fused="rms" in notes,
        overlap_data_parallel=False,
    )
    return Described(_zero1(row, system), "bfloat16", "bfloat16", "none")


SYSTEMS: Mapping[str, Callable[[Row], Described]] = {
    "torchtitan": _torchtitan,
    "fsdp1": _fsdp1,
    "nanotron": _nanotron,
    "megatron-deepspeed": _megatron_deepspeed,
    "internevo": _internevo,
    "megatron-lm": _megatron_lm,
    "megatron-core": _megatron_core,
    "deepspeed-3": _deepspeed_3,
    "aleph-alpha": _aleph,
}

SOURCES: Mapping[str, str] = {
    "torchtitan": "torchtitan",
    "torchao": "torchtitan",
    "ibm-float8": "torchtitan",
    "ibm-fsdp": "fsdp1",
    "llm-foundry": "fsdp1",
    "tinyllama": "fsdp1",
    "hf-ultrascale": "nanotron",
    "bigscience": "megatron-deepspeed",
    "internevo": "internevo",
    "megatron-sc21": "megatron-lm",
    "megatron-core": "megatron-core",
    "megatron-bridge": "megatron-core",
    "megatron-llama": "megatron-core",
    "megatron": "megatron-lm",
    "nemo": "megatron-core",
    "dgxc": "megatron-core",
    "aleph": "aleph-alpha",
}
"""System by how a source's name begins, the first that matches."""


FULL = ("full", "every_layer", "every layer", "uniform", "block", "true", "yes")
NONE = ("none", "disabled", "off", "false", "no")
"""What tables write for recompute."""


def _modes(row: Row, base: Described) -> Described:
    """With the row's own recompute, precision and pieces of the loss."""
    in_pieces = "chunked CE" in row.notes
    system = replace(
        base.system,
        float8=row.precision.startswith(("fp8", "mxfp8")),
        loss_chunks=8 if in_pieces else 1,
        whole_logits=in_pieces and row.date < LOSS_BY_HEAD,
        keeps_every_output=not _traced(row),
    )
    recompute: Recompute = base.recompute
    if row.recompute in FULL:
        recompute = "full"
    elif row.recompute in NONE:
        recompute = "none"
    elif row.recompute == "selective-layer" or (row.recompute == "selective" and name_of(row) == "fsdp1"):
        # Every other block recomputes whole.
        recompute, system = "full", replace(system, recompute_share=0.5)
    elif row.recompute.startswith("selective") and name_of(row).startswith("megatron"):
        # Only the core of attention is made again (arXiv 2205.05198): what fused attention does anyway.
        recompute, system = "none", replace(system, flash_attention=True)
    elif row.recompute.startswith("selective"):
        recompute = "selective"
    if recompute == "selective" and name_of(row) == "torchtitan":
        # torchtitan keeps the output of every other matmul, its graph_trainer that of each (``memory_policy.py``).
        every = any(word in row.notes for word in WHOLE_GRAPH)
        system = replace(system, kept_matmuls=1.0 if every else 0.5)
    return replace(base, system=system, recompute=recompute)
