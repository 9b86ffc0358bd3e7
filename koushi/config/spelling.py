"""The nearest legal spelling, and names that people bring from other tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_PIPELINE = "parallelism.pipeline_parallel_"

ELSEWHERE = {
    "tp": "parallelism.tensor_parallel_degree",
    "tp_size": "parallelism.tensor_parallel_degree",
    "tp_degree": "parallelism.tensor_parallel_degree",
    "tensor_parallel": "parallelism.tensor_parallel_degree",
    "tensor_parallel_size": "parallelism.tensor_parallel_degree",
    "tensor_model_parallel_size": "parallelism.tensor_parallel_degree",
    "pp": _PIPELINE + "degree",
    "pp_size": _PIPELINE + "degree",
    "pp_degree": _PIPELINE + "degree",
    "pipeline_parallel_size": _PIPELINE + "degree",
    "pipeline_model_parallel_size": _PIPELINE + "degree",
    "pipeline_parallel_microbatch_size": "training.microbatch_size",
    "schedule": _PIPELINE + "schedule",
    "virtual_stages": _PIPELINE + "stages_per_rank",
    "num_virtual_stages": _PIPELINE + "stages_per_rank",
    "pipeline_parallel_layers_per_rank": _PIPELINE + "layers_per_stage",
    "pipeline_parallel_split_points": _PIPELINE + "layers_per_stage",
    "dp": "parallelism.data_parallel_shard_degree",
    "dp_size": "parallelism.data_parallel_shard_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "fsdp": "parallelism.data_parallel_shard_degree",
    "fsdp_size": "parallelism.data_parallel_shard_degree",
    "fsdp_reshard_after_forward": "parallelism.reshard_after_forward",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "ddp": "parallelism.data_parallel_replicate_degree",
    "n_gpus": "parallelism.world_size",
    "num_gpus": "parallelism.world_size",
    "ngpu": "parallelism.world_size",
    "ranks": "parallelism.world_size",
    "nproc": "parallelism.world_size",
    "nproc_per_node": "parallelism.world_size",
    "local_batch_size": "training.microbatch_size",
    "batch_size": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size",
    "micro_batch_size": "training.microbatch_size",
    "per_device_train_batch_size": "training.microbatch_size",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "train_iters": "training.steps",
    "iterations": "training.steps",
    "max_seq_len": "training.seq_len",
    "sequence_length": "training.seq_len",
    "block_size": "training.seq_len",
    "context_length": "training.seq_len",
    "max_norm": "training.max_grad_norm",
    "clip_grad": "training.max_grad_norm",
    "grad_clip": "training.max_grad_norm",
    "gradient_clipping": "training.max_grad_norm",
    "activation_checkpoint": "training.recompute",
    "activation_checkpointing": "training.recompute",
    "gradient_checkpointing": "training.recompute",
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "betas": "optimizer.beta1",
    "wd": "optimizer.weight_decay",
    "warmup": "lr_schedule.warmup_steps",
    "lr_warmup_steps": "lr_schedule.warmup_steps",
    "decay_type": "lr_schedule.decay",
    "decay_ratio": "lr_schedule.decay_fraction",
    "min_lr": "lr_schedule.min_lr_ratio",
    "min_lr_factor": "lr_schedule.min_lr_ratio",
    "dtype": "precision.compute",
    "mixed_precision": "precision.compute",
    "mixed_precision_param": "precision.compute",
    "mixed_precision_reduce": "precision.reduce",
    "dataset": "data.source",
    "dataset_path": "data.path",
    "tokenizer_path": "data.tokenizer",
    "hf_assets_path": "data.tokenizer",
    "flavor": "model.name",
    "preset": "model.name",
    "hidden_size": "model.dim",
    "d_model": "model.dim",
    "num_layers": "model.n_layers",
    "num_hidden_layers": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "intermediate_size": "model.ffn_dim",
    "hidden_dim": "model.ffn_dim",
    "tie_word_embeddings": "model.tie_embeddings",
    "rms_norm_eps": "model.norm_eps",
    "eval_interval": "validation.every",
    "eval_freq": "validation.every",
    "log_freq": "metrics.every",
    "log_interval": "metrics.every",
    "enable_tensorboard": "metrics.tensorboard",
    "hw": "run.hardware",
    "chip": "run.hardware",
    "output_dir": "run.folder",
    "dump_folder": "run.folder",
    "initial_load_path": "run.resume",
    "init_timeout_seconds": "run.timeout",
    "train_timeout_seconds": "run.timeout",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "async_mode": "checkpoint.mode",
    "keep_latest_k": "checkpoint.keep_last",
    "save_total_limit": "checkpoint.keep_last",
}
"""Keys of torchtitan, Megatron, Transformers and others that mean one of ours."""

ELSEWHERE_IN = {
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.freq": "checkpoint.every",
    "checkpoint.folder": "run.folder",
    "validation.interval": "validation.every",
    "validation.freq": "validation.every",
    "validation.steps": "validation.batches",
}
"""The same where a name means something only in its section."""

_NO_CP = "context parallel does not exist yet: the mesh's cp has degree 1"
_NO_EP = "expert parallel does not exist yet, nor do models with experts"
_NO_WANDB = "there is no wandb: metrics.jsonl has every step, and metrics.tensorboard writes event files"
_NO_FLOAT8 = "float8 does not exist yet: precision.compute is float32, bfloat16 or float64"
_NO_PROFILER = "there is no profiler: koushi dry-run --trace FILE predicts a timeline, koushi report shows a run"
_EVERY = "{0}.every alone says: the steps between {1}, 0 for none"
ABSENT = {
    "cp": _NO_CP,
    "cp_size": _NO_CP,
    "context_parallel_degree": _NO_CP,
    "context_parallel_size": _NO_CP,
    "ep": _NO_EP,
    "ep_size": _NO_EP,
    "expert_parallel_degree": _NO_EP,
    "expert_model_parallel_size": _NO_EP,
    "expert_tensor_parallel_degree": _NO_EP,
    "num_experts": _NO_EP,
    "context_parallel_rotate_method": _NO_CP,
    "enable_async_tensor_parallel": "tensor parallel that overlaps its matmuls with communication does not exist yet",
    "disable_loss_parallel": "tensor parallel always has loss parallel",
    "enable_checkpoint": _EVERY.format("checkpoint", "checkpoints"),
    "checkpoint.enable": _EVERY.format("checkpoint", "checkpoints"),
    "validation.enable": _EVERY.format("validation", "validations"),
    "enable_wandb": _NO_WANDB,
    "wandb": _NO_WANDB,
    "gc_freq": "Python's garbage collector runs as in any program",
    "enable_cpu_offload": "nothing is offloaded to the host",
    "optimizer.implementation": "AdamW is always torch's fused kernel",
    "converters": _NO_FLOAT8,
    "float8": _NO_FLOAT8,
    "profiling": _NO_PROFILER,
    "enable_profiling": _NO_PROFILER,
    "job": "a run has its run file's name, and run.folder is where it writes",
    "comm": "run.timeout is how many seconds a collective may take",
}
"""What to say of keys and sections of other tools that have no counterpart, where a guess would lead astray."""

VALUES = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
    "off": "none",
    "disabled": "none",
    "op": "selective",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "zb": "InterleavedZeroBubble",
    "zb1p": "InterleavedZeroBubble",
    "default": "auto",
    "gpu": "cuda",
    "bin": "tokens",
    "random": "synthetic",
    "txt": "text",
    "json": "jsonl",
}
"""Values of other tools that mean one of ours."""


def nearest(word: str, legal: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The legal spelling that ``word`` most likely meant; ``cutoff``: how alike they must be, 0 to 1."""
    plain = {_plain(one): one for one in legal}
    if _plain(word) in plain:
        return plain[_plain(word)]
    meant = VALUES.get(word.lower())
    if meant is not None and meant in plain.values():
        return meant
    close = get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[close[0]] if close else None


def absent(dotted: str) -> str | None:
    """What to say of a key or a section for something that is not there: one of its section, or of any."""
    known = dotted.lower().replace("-", "_")
    return ABSENT.get(known) or ABSENT.get(known.rpartition(".")[2])


def nearest_key(dotted: str, legal: Sequence[str]) -> str | None:
    """The dotted key that an unknown one most likely meant: a known one of other tools, one of its section, or any."""
    section, _, name = dotted.rpartition(".")
    plain = dotted.lower().replace("-", "_")
    known = ELSEWHERE_IN.get(plain) or ELSEWHERE.get(plain.rpartition(".")[2])
    if known in legal:
        return known
    siblings = [key.rpartition(".")[2] for key in legal if key.rpartition(".")[0] == section]
    if close := get_close_matches(name, siblings, n=1, cutoff=0.8):
        return f"{section}.{close[0]}" if section else close[0]
    by_name = {key.rpartition(".")[2]: key for key in reversed(legal)}
    if name in by_name:
        return by_name[name]
    if close := get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"{section}.{close[0]}" if section else close[0]
    close = get_close_matches(name, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")
