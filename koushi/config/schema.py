"""The run file: the only schema. Every key, its type, its default and what it means.

Only what one value can tell about itself is checked here (types, ranges, spellings); what depends
on several values, on the model or on the world is checked in ``koushi.check``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
SHARD_NEEDED = "an integer of at least 1, or -1 for what is left of the world"
ShardDegree = Annotated[int, Field(strict=True, json_schema_extra={"needed": SHARD_NEEDED + ","})]

ScheduleName = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
DtypeName = Literal["float32", "bfloat16", "float64"]
MasterDtype = Literal["float32", "float64"]

PATHS = ("model.hf", "data.path", "data.tokenizer", "run.hardware")
"""Keys whose value is a path, or may be one: relative to the run file, also on the command line."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RopeScaling(Section):
    """Llama 3.1's stretching of rotary frequencies to longer sequences."""

    factor: Positive = 8.0
    """How many times as long the longest wavelengths become."""
    low_freq_factor: Positive = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are stretched in full."""
    high_freq_factor: Positive = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor stay as they are."""
    original_max_seq_len: Count = 8192
    """Tokens of a sample before the stretching."""


class Model(Section):
    """Which model. A size left empty comes from the named preset, or from the folder hf."""

    name: str = "llama3-debug"
    """A preset: llama3-debug, llama3-1b, llama3-3b, llama3-8b, llama3-70b, llama3-405b."""
    hf: str | None = None
    """A Hugging Face folder whose weights the run starts from; the sizes are then its own. Relative to the run file."""
    vocab_size: Count | None = None
    """Token ids that the model knows."""
    dim: Count | None = None
    """Width of the residual stream."""
    n_layers: Count | None = None
    """Transformer blocks."""
    n_heads: Count | None = None
    """Query heads."""
    n_kv_heads: Count | None = None
    """Key and value heads; fewer than n_heads is grouped-query attention."""
    ffn_dim: Count | None = None
    """Inner width of the SwiGLU feed-forward."""
    tie_embeddings: Flag | None = None
    """Whether the output projection is the token embedding."""
    norm_eps: Positive | None = None
    """Added to the mean square in RMSNorm."""
    rope_theta: Positive | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None


class Parallelism(Section):
    """Degrees of the mesh, outermost dim first, and how each technique works."""

    pipeline_parallel_degree: Count = 1
    """pp: how many ranks the layers are divided over."""
    data_parallel_replicate_degree: Count = 1
    """dp_replicate: whole copies of the model, each on samples of its own."""
    data_parallel_shard_degree: ShardDegree = 1
    """dp_shard: copies that share out their parameters (FSDP)."""
    tensor_parallel_degree: Count = 1
    """tp: how many pieces every matrix is cut into; activations in between are cut along the sequence."""
    world_size: Count | None = None
    """Devices in all; empty: the product of the degrees, or what the launcher started."""

    pipeline_parallel_schedule: ScheduleName = "1F1B"
    """The order in which microbatches go through the stages, and what it asks of their number."""
    pipeline_parallel_stages_per_rank: Count | None = None
    """Virtual stages; empty: 1, or 2 for schedules that need several."""
    pipeline_parallel_layers_per_stage: tuple[Natural, ...] | None = None
    """Layers of every stage, first to last; empty: even, the first and last stage lighter."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Whether FSDP frees gathered parameters after forward; auto: never under pipelining, else always."""


class Training(Section):
    """The batch of a step, the length of the run, and memory against time."""

    seq_len: Count = 512
    """Tokens of one sample."""
    global_batch_size: Count = 8
    """Samples of one step over all devices."""
    microbatch_size: Count = 1
    """Samples of one forward pass on one device."""
    steps: Count = 50
    """Optimizer steps of the whole run."""
    seed: Natural = 0
    """Initial weights and the order of samples follow from it, on any layout alike."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm; empty: never."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in backward: none, all but matmuls and attention, or whole blocks."""
    compile: Flag = False
    """torch.compile every transformer block."""


class Precision(Section):
    """The dtypes of what is kept, computed and sent."""

    parameters: MasterDtype = "float32"
    """Master parameters and optimizer state."""
    compute: DtypeName = "float32"
    """Activations and matmuls."""
    reduce: DtypeName = "float32"
    """Gradient reductions."""


class Optimizer(Section):
    """AdamW (arXiv 1711.05101)."""

    name: Literal["AdamW"] = "AdamW"
    """The only one there is."""
    lr: Positive = 1e-3
    """The learning rate after warm-up, its peak."""
    beta1: Beta = 0.9
    """How slowly the running mean of gradients moves."""
    beta2: Beta = 0.95
    """How slowly the running mean of squared gradients moves."""
    eps: Positive = 1e-8
    """Added to the root of that mean."""
    weight_decay: NonNegative = 0.1
    """Applies to matrices; norm weights are not decayed."""


class LrSchedule(Section):
    """Linear warm-up, a stable part, then decay to a share of the peak."""

    warmup_steps: Natural = 0
    """Steps in which the rate rises from near 0."""
    decay: Literal["none", "linear", "cosine"] = "cosine"
    """How it falls."""
    decay_fraction: Fraction = 1.0
    """Share of the steps after warm-up that decay; the part before is stable."""
    min_lr_ratio: Fraction = 0.1
    """Where it ends, as a share of optimizer.lr."""


class Data(Section):
    """What the run reads: text with a tokenizer, or token ids."""

    source: Literal["embedded", "text", "jsonl", "parquet", "tokens", "synthetic"] = "embedded"
    """embedded: text that ships with Python; tokens: .bin files of token ids; synthetic: random ids."""
    path: str | None = None
    """A file, a folder or a glob for text, jsonl, parquet and tokens; relative to the run file."""
    text_key: str = "text"
    """The field of a jsonl or parquet row that holds the text."""
    tokenizer: str = "embedded"
    """embedded, or a tokenizer.json, relative to the run file. Where it is not set and model.hf has one: that."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Of .bin files."""
    end_of_document_id: Natural | None = None
    """The token that ends a document; empty: the tokenizer's own, and none in .bin files."""
    predict_across_documents: Flag = False
    """Whether the first token of a document counts in the loss, predicted from the document before."""
    masked_fraction: Fraction = 0.0
    """synthetic only: share of labels left out of the loss, unequally per sample."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.05
    """Share of the samples held out for validation."""


class Validation(Section):
    """The loss on samples that are never trained on."""

    every: Natural = 0
    """Steps between validations; 0: never."""
    batches: Count = 4
    """Global batches of one validation."""


class Metrics(Section):
    """What is told of a run while it goes."""

    every: Count = 1
    """Steps between progress lines."""
    tensorboard: Flag = False
    """Also write TensorBoard event files (needs the tensorboard extra)."""


class Checkpoint(Section):
    """What is kept of a run, so that it can be gone on with. Off while every is 0."""

    every: Natural = 0
    """Steps between checkpoints; 0: none. The last step of a run has one too."""
    mode: Literal["async", "sync"] = "async"
    """Whether training goes on while a checkpoint is written, from a copy in host memory."""
    keep_last: Count = 3
    """How many of the newest are kept."""
    keep_every: Natural = 0
    """Those of every so many steps are kept for good; 0: none."""


class Run(Section):
    """Where the run writes, what it goes on from, and how it starts and ends."""

    folder: str | None = None
    """Where the run writes; empty: runs/<name of the run file>, relative to the current folder."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of the run's own folder, if nothing but the layout and the length differs;
    never: begin anew in the next free folder; else the path of a checkpoint or of a run folder to go on from, whatever
    differs, in a new folder."""
    grace: Positive = 30.0
    """Seconds after SIGTERM in which a run with checkpoints finishes its step, saves and exits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees a GPU, else cpu."""
    hardware: str | None = None
    """What ``koushi plan`` assumes: a name that ``koushi hardware`` knows, or a file, relative to the run file."""
    timeout: Annotated[float, Field(ge=1, le=604_800, allow_inf_nan=False)] = 600.0
    """Seconds that a collective may take before the run is given up."""


class Debug(Section):
    """Watching a run at work."""

    audit: Flag = False
    """Whether a run's first step is watched, and its collectives compared with those that were planned. That step
    is not compiled."""


class JobConfig(Section):
    """A whole run file."""

    model: Model = Model()
    parallelism: Parallelism = Parallelism()
    training: Training = Training()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule = LrSchedule()
    data: Data = Data()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
    debug: Debug = Debug()
