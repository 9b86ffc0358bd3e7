"""A job made small enough to train here a few steps, its layout kept. No torch.

What decides the maths of a layout is kept: the degrees (up to what this machine can start), the
schedule, which heads are cut or copied, uneven stages, tied embeddings, unequal token counts. Widths,
lengths and counts are not: they shrink to the smallest the layout allows.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from koushi.config.schema import JobConfig, LrSchedule, MasterDtype, Precision
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.flops import parameter_count
from koushi.models.llama.sizes import LlamaSize
from koushi.optim.schedule import learning_rate
from koushi.schedules import layer_ranges, nearest_microbatches

MOST_RANKS = 128
MOST_PARAMETERS = 8_000_000
MOST_STEP_TOKENS = 8192
LEAST_RATE = 3e-4
"""AdamW moves a weight by about the learning rate, and those of norms are 1: less would be lost in what float32 allows
for rounding, so that a layout that updates nothing would pass."""
RATE = 1e-3
"""Of every step, where the run's own would be less in one."""


def scale_down(job: Job, precision: MasterDtype) -> tuple[Job, list[str]]:
    """The job in ``precision`` throughout, small enough for this machine, and what was changed, for people."""
    mesh = _fewer_ranks(job.mesh)
    small = parameter_count(job.size) <= MOST_PARAMETERS and mesh == job.mesh
    stages = job.stages if small else _fewer_layers(job)
    if mesh.degree("pp") != job.mesh.degree("pp"):
        stages = _first_and_last(stages, mesh.degree("pp") * job.stages_per_rank)
    size = job.size if small else _narrower(job, mesh.degree("tp"), sum(len(stage) for stage in stages))
    scaled = _with_batches(Job(job.config, size, mesh, stages, job.name, job.base))
    config = _config(scaled, precision)
    notes = [
        f"{what} {before} -> {after}"
        for what, before, after in (
            ("processes", job.mesh.world_size, mesh.world_size),
            ("mesh", job.mesh, mesh),
            ("layers", job.size.n_layers, size.n_layers),
            ("dim", job.size.dim, size.dim),
            ("heads", job.size.n_heads, size.n_heads),
            ("KV heads", job.size.n_kv_heads, size.n_kv_heads),
            ("ffn_dim", job.size.ffn_dim, size.ffn_dim),
            ("vocabulary", job.size.vocab_size, size.vocab_size),
            ("seq_len", job.config.training.seq_len, config.training.seq_len),
            ("global batch", job.config.training.global_batch_size, config.training.global_batch_size),
            ("weights", job.config.model.hf, config.model.hf or "random"),
            ("data", job.config.data.source, config.data.source),
        )
        if before not in (None, after)
    ]
    return Job(config, size, mesh, stages, job.name, job.base), notes


def with_updates(job: Job, steps: int) -> tuple[Job, list[str]]:
    """The job with updates that show in each of ``steps``, where warm-up or decay leaves none, and what was changed."""
    training, optimizer, schedule = job.config.training, job.config.optimizer, job.config.lr_schedule
    least = min(learning_rate(step, training.steps, optimizer.lr, schedule) for step in range(steps))
    if least >= LEAST_RATE:
        return job, []
    update = {"optimizer": optimizer.model_copy(update={"lr": RATE}), "lr_schedule": LrSchedule(decay="none")}
    config = job.config.model_copy(update=update)
    return replace(job, config=config), [f"learning rate {least:.3g} at the least -> {RATE:g} throughout"]


def single_process(job: Job) -> Job:
    """The same training on a mesh of one."""
    parallelism = job.config.parallelism.model_copy(
        update={
            "pipeline_parallel_degree": 1,
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": 1,
            "tensor_parallel_degree": 1,
            "world_size": 1,
            "pipeline_parallel_stages_per_rank": None,
            "pipeline_parallel_layers_per_stage": None,
        }
    )
    config = job.config.model_copy(update={"parallelism": parallelism})
    return Job(config, job.size, MeshSpec.of(), (range(job.size.n_layers),), job.name, job.base)


def _fewer_ranks(mesh: MeshSpec) -> MeshSpec:
    """Halve the largest degree, data parallel ones first, until the world is small enough; none that is on goes off."""
    degrees = dict(zip(mesh.names, mesh.shape, strict=True))
    while MeshSpec.of(**degrees).world_size > MOST_RANKS:
        data = max(("dp_replicate", "dp_shard"), key=lambda name: degrees[name])
        name = data if degrees[data] > 2 else max(degrees, key=lambda name: degrees[name])
        degrees[name] = max(2, degrees[name] // 2)
    return MeshSpec.of(**degrees)


def _fewer_layers(job: Job) -> tuple[range, ...]:
    """Stages of at most two layers, lighter ones still lighter."""
    heaviest = max(len(stage) for stage in job.stages)
    return layer_ranges([min(len(stage), 2 if len(stage) == heaviest else 1) for stage in job.stages])


def _first_and_last(stages: tuple[range, ...], n_stages: int) -> tuple[range, ...]:
    counts = [len(stage) for stage in stages]
    return layer_ranges(counts[: n_stages // 2] + counts[len(counts) - (n_stages - n_stages // 2) :])


def _narrower(job: Job, tp: int, n_layers: int) -> LlamaSize:
    """As few heads as ``tp`` allows, KV heads cut or copied as before, of at most 8 channels each."""
    size = job.size
    kv_heads = tp
    if size.n_kv_heads % job.mesh.degree("tp"):
        kv_heads = max((count for count in range(1, min(size.n_kv_heads + 1, tp)) if tp % count == 0), default=1)
    heads = lcm(kv_heads * (1 if size.n_heads == size.n_kv_heads else 2), tp)
    narrowed = [
        replace(
            size,
            vocab_size=max(1, 256 // tp) * tp,
            dim=heads * width,
            n_layers=n_layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            ffn_dim=max(1, 3 * heads * width // tp) * tp,
        )
        for width in (8, 4, 2)
    ]
    return next((one for one in narrowed if parameter_count(one) <= MOST_PARAMETERS), narrowed[-1])


def _with_batches(job: Job) -> Job:
    """Shorter samples and fewer microbatches, as few as the schedule takes."""
    training, tp = job.config.training, job.mesh.degree("tp")
    seq_len, microbatch = training.seq_len, training.microbatch_size
    if seq_len * training.global_batch_size > MOST_STEP_TOKENS:
        seq_len, microbatch = min(seq_len, max(1, 64 // tp) * tp), 1
    schedule = job.config.parallelism.pipeline_parallel_schedule
    pp, n_stages = job.mesh.degree("pp"), len(job.stages)
    microbatches = training.global_batch_size // (job.data_parallel_degree * training.microbatch_size)
    wanted = min(max(1, microbatches), max(2, 2 * n_stages))
    if pp > 1:
        wanted = nearest_microbatches(schedule, pp, n_stages, wanted)[-1]
    update = {
        "seq_len": seq_len,
        "microbatch_size": microbatch,
        "global_batch_size": microbatch * wanted * job.data_parallel_degree,
    }
    config = job.config.model_copy(update={"training": training.model_copy(update=update)})
    return Job(config, job.size, job.mesh, job.stages, job.name, job.base)


def _config(job: Job, precision: MasterDtype) -> JobConfig:
    """The config that says what ``job`` is: its degrees, sizes and stages, and synthetic data of unequal counts."""
    size, mesh = job.size, job.mesh
    sizes = {name: getattr(size, name) for name in LlamaSize.__dataclass_fields__}
    synthetic = {
        "source": "synthetic",
        "path": None,
        "tokenizer": "embedded",
        "masked_fraction": 0.4,
        "end_of_document_id": None,
    }
    if any(getattr(job.config.model, name) != value for name, value in sizes.items()):
        sizes["hf"] = None  # of another size than the folder's weights
    layers = tuple(len(stage) for stage in job.stages) if len(job.stages) > 1 else None
    parallelism = job.config.parallelism.model_copy(
        update={
            "pipeline_parallel_degree": mesh.degree("pp"),
            "data_parallel_replicate_degree": mesh.degree("dp_replicate"),
            "data_parallel_shard_degree": mesh.degree("dp_shard"),
            "tensor_parallel_degree": mesh.degree("tp"),
            "world_size": mesh.world_size,
            "pipeline_parallel_layers_per_stage": layers,
        }
    )
    return job.config.model_copy(
        update={
            "model": job.config.model.model_copy(update=sizes),
            "parallelism": parallelism,
            "precision": Precision(parameters=precision, compute=precision, reduce=precision),
            "data": job.config.data.model_copy(update=synthetic),
        }
    )
