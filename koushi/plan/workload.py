"""What the planner reads: a model, a layout and how a system carries it out. No torch.

A job of Koushi gives one through ``of_job``; published runs of other systems are described with the
same words, so that one set of formulas is held against all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import LlamaSize

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Transformer:
    """The shapes of a dense decoder."""

    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    tie_embeddings: bool = False
    gated: bool = True
    """SwiGLU's three matrices; else two and GELU."""
    biases: bool = False
    layer_norm: bool = False
    """LayerNorm with a bias; else RMSNorm."""
    learned_positions: int = 0
    """Rows of a learned table of positions; 0: rotary or none."""

    @classmethod
    def of(cls, size: LlamaSize) -> Transformer:
        return cls(
            n_layers=size.n_layers,
            dim=size.dim,
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            head_dim=size.head_dim,
            ffn_dim=size.ffn_dim,
            vocab_size=size.vocab_size,
            tie_embeddings=size.tie_embeddings,
        )

    @cached_property
    def of_any_depth(self) -> Transformer:
        """Without its layers: what stages of models of any depth are remembered by."""
        return replace(self, n_layers=0)


@dataclass(frozen=True)
class System:
    """How a training system carries a layout out; the defaults are Koushi's own ways."""

    sequence_parallel: bool = True
    """Whether activations between tp regions are cut along the sequence."""
    keeps_gathered: bool = True
    """Whether what a tp region has gathered is kept for backward; else it is gathered again, as Megatron does."""
    gathers_beside: bool = False
    """Whether that comes beside the matmuls of inputs' gradients, so that it takes no time."""
    loss_parallel: bool = True
    """Whether logits stay cut along the vocabulary."""
    sharding: Literal["fsdp", "optimizer", "none"] = "fsdp"
    """What dp_shard shares out: parameters, gradients and optimizer state; the state alone (ZeRO-1, then over all
    data-parallel ranks); nothing."""
    hybrid: bool = False
    """Whether ZeRO-1 sums gradients on every rank, not on a parameter's owner alone, so that every group of dp_shard
    can have an owner of its own, and has where that is above 1, as InternEvo's."""
    separate_masters: bool = False
    """Whether parameters in the compute dtype are kept besides the masters, as Megatron does."""
    gradients_at_once: bool = True
    """Whether a weight's gradient is added to the step's as soon as it is made, where ``sharding`` is not fsdp; else
    after a microbatch's whole backward, as nanotron does."""
    flash_attention: bool = True
    """Whether attention scores stay out of memory."""
    attention_kernel: Literal["flash1", "flash2", "flash3"] = "flash2"
    """Which generation of fused attention: before FlashAttention-2 (Triton's of 2023 too), it (torch's own), or
    FlashAttention-3 and cuDNN's on Hopper and later."""
    newest_libraries: bool = False
    """Whether matmuls run on the vendor's newest libraries, as in its containers; else on those of a torch release."""
    gathers_float8: bool = False
    """Whether FSDP gathers the linear layers' weights in float8."""
    fused: bool = False
    """Whether elementwise work is fused, by a compiler or by hand."""
    float8: bool = False
    """Whether the linear layers multiply in float8."""
    sequence_first: bool = False
    """Whether a microbatch's activations lie sequence first, so that cutting them along it copies nothing."""
    blocking_sends: bool = False
    """Whether a rank waits until what it sends to the next stage has arrived."""
    cut_sends: bool = False
    """Whether activations that are whole on every tp rank go between stages in pieces, one from each, and are gathered
    on arrival (arXiv 2104.04473, section 4.1)."""
    overlap_data_parallel: bool = True
    gathers_update: Literal["by_unit", "at_once", "by_owner"] = "by_unit"
    """How ZeRO-1 gathers the parameters that it has updated: unit by unit; all in one flat call, from which the host
    copies every rank's piece of every tensor, as it scatters all gradients in one; or by a broadcast of each rank's
    part, one after the other."""
    overlap_tensor_parallel: bool = False
    buffers_every_microbatch: bool = True
    """Whether a stage holds a receive buffer for every microbatch of the step, as torch's does; else one each way."""
    blocking_launches: bool = False
    """Whether the host waits for every kernel (CUDA_LAUNCH_BLOCKING), so that nothing hides what it does between."""
    stops_early: bool = True
    """Whether full recompute ends with the last tensor that backward needs, as torch's without reentry does; else a
    block's whole forward is done again, with its last matmul and collective."""
    copies: float = 0.0
    """Bytes per parameter of a rank that are held besides: the buckets of torch's DistributedDataParallel, gradients
    zeroed and not freed, parameters from before they were laid out flat."""
    expandable_segments: bool = False
    """Whether torch's allocator may grow its segments (``expandable_segments:True``), which it doesn't unasked."""
    own_streams: bool = True
    """Whether FSDP's collectives allocate on streams of their own, as ``fully_shard``'s do; traced ones don't."""
    other_bytes: int = 0
    """What a GPU holds throughout besides: buckets that collectives go through, kernels loaded ahead of use."""
    flat_update: float = 0.0
    """Bytes per updated parameter that the update lays out in flat buffers, too large for what activations left
    behind: DeepSpeed's gradients in float32 and flattened."""
    blocks_ahead: int = 0
    """Blocks whose forwards the host has launched ahead of the device. What they have added up over tp is nobody else's
    until the device is through with it, where NCCL's streams are recorded with tensors (torch's ``record_stream``)."""
    recompute_share: float = 1.0
    """Share of the layers that recompute at all."""
    kept_matmuls: float = 1.0
    """Share of the matmuls whose outputs selective recompute keeps."""
    keeps_every_output: bool = False
    """Whether among these are outputs that backward doesn't need, as with torch's own selective recompute: what a
    scatter adds up, and what comes from a block's last matmul on."""
    fused_projections: bool = False
    """Whether query, key and value are one matmul, and both inner ones of a gated feed-forward."""
    host_operations: float = 0.0
    """What the host issues for one block's forward, and as much again for its backward; 0: as Koushi does."""
    distributed_loss: bool = False
    """Whether the loss of logits cut along the vocabulary is torch's ``loss_parallel``, which makes two more arrays."""
    compiled_loss: bool = False
    """Whether a compiler makes one kernel of the loss, which reads the logits and writes their gradient."""
    softmax_loss: bool = False
    """Whether the loss lets go of the logits once they are cast to float32, and keeps their softmax alone."""
    loss_chunks: int = 1
    """Pieces of the sequence that logits and loss are computed in, one after the other."""
    whole_logits: bool = False
    """Whether only the loss is in pieces, of logits that are there whole."""


@dataclass(frozen=True)
class Workload:
    """One training step of a model on a layout."""

    model: Transformer
    mesh: MeshSpec
    stage_layers: tuple[int, ...]
    """Layers of every pipeline stage, first to last; one stage when pp is 1."""
    schedule: str
    """A name of ``koushi.schedules.SCHEDULES``; no meaning when pp is 1."""
    seq_len: int
    microbatch_size: int
    microbatches: int
    recompute: Recompute = "none"
    reshard_after_forward: bool = True
    parameters: str = "float32"
    """Dtype of masters and optimizer state."""
    compute: str = "bfloat16"
    reduce: str = "float32"
    system: System = field(default=System())

    @property
    def stages_per_rank(self) -> int:
        return len(self.stage_layers) // self.mesh.degree("pp")

    @property
    def global_batch_size(self) -> int:
        """Samples of one step."""
        return self.mesh.degree("dp_replicate", "dp_shard") * self.microbatches * self.microbatch_size

    @property
    def owners(self) -> tuple[str, ...]:
        """The mesh dims that ZeRO-1 shares the optimizer's state over."""
        if self.system.sharding != "optimizer":
            return ()
        within = self.system.hybrid and self.mesh.degree("dp_shard") > 1
        return ("dp_shard",) if within else ("dp_replicate", "dp_shard")

    @property
    def tokens(self) -> int:
        """Tokens of one step over all devices."""
        return self.global_batch_size * self.seq_len


def koushis(*, compiled: bool = False) -> System:
    """How Koushi itself works."""
    return System(fused=compiled, expandable_segments=True)


def of_job(job: Job) -> Workload:
    """The workload of a checked run file."""
    config = job.config
    return Workload(
        model=Transformer.of(job.size),
        mesh=job.mesh,
        stage_layers=tuple(len(stage) for stage in job.stages),
        schedule=config.parallelism.pipeline_parallel_schedule,
        seq_len=config.training.seq_len,
        microbatch_size=config.training.microbatch_size,
        microbatches=job.microbatches,
        recompute=config.training.recompute,
        reshard_after_forward=config.parallelism.reshard_after_forward == "always",
        parameters=config.precision.parameters,
        compute=config.precision.compute,
        reduce=config.precision.reduce,
        system=koushis(compiled=config.training.compile),
    )
