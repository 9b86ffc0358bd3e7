"""What a cross-field rule is: the keys it reads, and the findings it makes from the facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from koushi.check.vocabulary import ids_needed, tokenizer_file
from koushi.config.load import RunFile
from koushi.config.schema import JobConfig
from koushi.models.llama.hf import read_size
from koushi.models.llama.sizes import LlamaSize, llama_size
from koushi.schedules import SCHEDULES

NAME = "model.name"
HF = "model.hf"
VOCAB = "model.vocab_size"
DIM = "model.dim"
LAYERS = "model.n_layers"
HEADS = "model.n_heads"
KV_HEADS = "model.n_kv_heads"
FFN = "model.ffn_dim"
PP = "parallelism.pipeline_parallel_degree"
DP_REPLICATE = "parallelism.data_parallel_replicate_degree"
DP_SHARD = "parallelism.data_parallel_shard_degree"
TP = "parallelism.tensor_parallel_degree"
TP_OF_MODEL = f"{TP}.of_model"
"""No key, but what is told of tp once: a degree that the heads cannot be cut by."""
WORLD = "parallelism.world_size"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
PER_RANK = "parallelism.pipeline_parallel_stages_per_rank"
PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
RESHARD = "parallelism.reshard_after_forward"
GLOBAL_BATCH = "training.global_batch_size"
MICROBATCH = "training.microbatch_size"
SEQ_LEN = "training.seq_len"
STEPS = "training.steps"
COMPILE = "training.compile"
RECOMPUTE = "training.recompute"

TO_TRAIN = "nothing reads it here, and the machine that trains needs it"


@dataclass(frozen=True)
class Finding:
    """``keys``: what the finding is about, the most telling first. ``spoils``: keys later rules can't read."""

    keys: tuple[str, ...]
    what: str
    legal: str
    spoils: tuple[str, ...] = ()
    elsewhere: str = ""
    """Of what this machine lacks, and the one that trains may have: what a command that does without it says."""


@dataclass(frozen=True)
class Facts:
    """What rules read: the config and what follows from it. A rule that reads a property reads its keys."""

    run_file: RunFile
    launched: int | None
    """How many processes a launcher has started or will start."""
    made_up_of: str = ""
    """What they are, in brackets after a space."""

    @property
    def config(self) -> JobConfig:
        return self.run_file.config

    @cached_property
    def size(self) -> LlamaSize:
        """Reads model.*; the rule on model.hf has found its folder sound."""
        return llama_size(self.config.model) if self.hf is None else read_size(self.hf)

    @property
    def hf(self) -> Path | None:
        """The Hugging Face folder that the weights come from; reads HF."""
        folder = self.config.model.hf
        return None if folder is None else self.base / Path(folder).expanduser()

    @property
    def tokenizer(self) -> str:
        """Not set, the one in the Hugging Face folder, if there is one; reads data.tokenizer and HF."""
        if self.hf is not None and not self.run_file.is_set("data.tokenizer"):
            beside = (self.hf / "tokenizer.json").absolute()
            if beside.is_file():
                return str(beside)
        return self.config.data.tokenizer

    @cached_property
    def ids_needed(self) -> int | None:
        """What vocab_size must be at least; None where no tokenizer is used, or none can be read."""
        data, sound = self.config.data, self.run_file.is_sound
        unused = data.source == "synthetic" or (data.source == "tokens" and self.tokenizer == "embedded")
        if unused or not (sound("data.source") and sound("data.tokenizer")):
            return None
        try:
            return ids_needed(tokenizer_file(self.tokenizer, self.base))
        except (OSError, ValueError, RuntimeError):
            return None  # told by the rule on the tokenizer

    @property
    def base(self) -> Path:
        return self.run_file.path.parent

    @property
    def world(self) -> int | None:
        """The world that was asked for; reads WORLD."""
        return self.launched if self.launched is not None else self.config.parallelism.world_size

    @property
    def dp_shard(self) -> int:
        """With -1 resolved; reads DP_SHARD, which the rule on degrees has found sound."""
        parallelism = self.config.parallelism
        if parallelism.data_parallel_shard_degree != -1:
            return parallelism.data_parallel_shard_degree
        assert self.world is not None, "the rule on degrees spoils a -1 without a world"
        return self.world // self.degrees_but_shard

    @property
    def degrees_but_shard(self) -> int:
        """Reads PP, DP_REPLICATE and TP."""
        one = self.config.parallelism
        return one.pipeline_parallel_degree * one.data_parallel_replicate_degree * one.tensor_parallel_degree

    @property
    def shard_follows(self) -> bool:
        """Whether dp_shard is what the world leaves of it; reads DP_SHARD."""
        return self.run_file.follows or self.config.parallelism.data_parallel_shard_degree == -1

    @property
    def data_parallel(self) -> int:
        """How many ways the global batch is split; reads DP_REPLICATE and DP_SHARD."""
        return self.config.parallelism.data_parallel_replicate_degree * self.dp_shard

    @property
    def pp(self) -> int:
        return self.config.parallelism.pipeline_parallel_degree

    @property
    def stages_per_rank(self) -> int:
        """Reads PP, SCHEDULE and PER_RANK."""
        parallelism = self.config.parallelism
        if parallelism.pipeline_parallel_stages_per_rank is not None:
            return parallelism.pipeline_parallel_stages_per_rank
        return 1 if self.pp == 1 else SCHEDULES[parallelism.pipeline_parallel_schedule].fewest_stages_per_rank

    @property
    def n_stages(self) -> int:
        """Reads PP, SCHEDULE and PER_RANK."""
        return self.pp * self.stages_per_rank


@dataclass(frozen=True)
class Rule:
    """``find`` is called where every key of ``reads`` is sound."""

    reads: tuple[str, ...]
    find: Callable[[Facts], Iterator[Finding]]


def listed(values: Iterable[int], most: int = 8) -> str:
    """``1, 2, 4 or 8``; a long list is cut short."""
    texts = [str(value) for value in values]
    if len(texts) > most:
        return ", ".join(texts[:most]) + ", ..."
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def divisors(number: int, most: int = 4096) -> tuple[int, ...]:
    """Of ``number``, up to ``most``."""
    return tuple(one for one in range(1, min(number, most) + 1) if number % one == 0)


def multiples_near(number: int, unit: int) -> tuple[int, ...]:
    """The multiples of ``unit`` around ``number``, itself left out."""
    below = (number - 1) // unit * unit
    above = number // unit * unit + unit
    return (below, above) if below > 0 else (above,)
