"""Llama in Hugging Face's format: names, the order of rotary channels, config.json. No torch.

Hugging Face turns channel i of a head together with channel i + E/2 (E is head_dim), Koushi channel
2i together with 2i + 1: rows of the query and key projections are stored in another order. Of one
head, row 2i + s here is row s E/2 + i there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koushi.config.schema import RopeScaling
from koushi.errors import WeightsError
from koushi.models.hf_folder import CONFIG, Survey, differences, read_object, survey
from koushi.models.llama.layout import EMBEDDING, OUTPUT, parameters
from koushi.models.llama.sizes import LlamaSize

KIND, ARCHITECTURE = "llama", "LlamaForCausalLM"
"""``model_type`` and one of ``architectures`` of the models that are read."""
ENDS = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", OUTPUT: "lm_head.weight"}
IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
LM_HEAD = ENDS[OUTPUT]
_ROTARY = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""A table that old files keep and that follows from config.json."""


def hf_name(name: str) -> str:
    """Hugging Face's name of our parameter ``name``."""
    if name in ENDS:
        return ENDS[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{IN_BLOCK[rest.removesuffix('.weight')]}.weight"


def rotary(name: str) -> bool:
    """Whether the rows of our parameter ``name`` stand in another order there."""
    return name.endswith((".attention.wq.weight", ".attention.wk.weight"))


class OtherArchitecture(WeightsError):
    """A folder of another model than Llama, of which nothing else is told: everything would follow from that."""


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of Hugging Face's tensor and where they go: every ``into.step``-th row of ours."""

    source: slice
    into: slice


def runs(rows: slice, head_dim: int) -> Iterator[Run]:
    """Where our rows ``rows`` of a query or key projection stand; ``into`` counts from ``rows.start``."""
    half = head_dim // 2
    for head in range(rows.start // head_dim, -(-rows.stop // head_dim)):
        begin = head * head_dim
        first, stop = max(rows.start - begin, 0), min(rows.stop - begin, head_dim)
        for side in (0, 1):
            low, high = (first - side + 1) // 2, (stop - side + 1) // 2
            if low < high:
                into = begin + 2 * low + side - rows.start
                source = begin + side * half
                yield Run(slice(source + low, source + high), slice(into, into + 2 * (high - low) - 1, 2))


def hf_shapes(size: LlamaSize) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Hugging Face file of this size, a tied output left out."""
    return {hf_name(name): parameter.shape for name, parameter in parameters(size).items()}


def check_folder(folder: Path) -> tuple[LlamaSize, Survey]:
    """The size and the tensors of a folder. Raises WeightsError with everything that is wrong with it."""
    wrong: list[str] = []
    size = None
    try:
        size = read_size(folder)
    except OtherArchitecture:
        raise
    except WeightsError as error:
        if not folder.is_dir():
            raise
        wrong.extend(error.reasons)
    found = survey(folder)
    wrong.extend(found.wrong)
    found = Survey(
        {name: held for name, held in found.tensors.items() if not _ROTARY.fullmatch(name)}, found.wrong, found.unread
    )
    if size is not None:
        expected = hf_shapes(size)
        optional: frozenset[str] = frozenset()
        if size.tie_embeddings:
            expected[LM_HEAD] = expected[ENDS[EMBEDDING]]
            optional = frozenset({LM_HEAD})
        wrong.extend(differences(folder, found, expected, optional))
    if size is None or wrong:
        raise WeightsError(wrong)
    return size, found


def read_size(folder: Path) -> LlamaSize:
    """The size that ``folder/config.json`` describes. Raises WeightsError with everything that is wrong."""
    if not folder.is_dir():
        raise WeightsError([f"{folder}: there is no such folder; a Hugging Face model is a folder with a {CONFIG}"])
    return size_of(read_object(folder / CONFIG), folder / CONFIG)


def size_of(config: Mapping[str, Any], where: Path) -> LlamaSize:
    """As ``read_size``, of a config.json that has been read from ``where``."""
    refuse_other_architecture(config, where)
    reader = _Reader(config)
    reader.refuse_what_differs()
    heads = reader.count("num_attention_heads")
    given = {
        "vocab_size": reader.count("vocab_size"),
        "dim": reader.count("hidden_size"),
        "n_layers": reader.count("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": reader.count("num_key_value_heads", heads),
        "ffn_dim": reader.count("intermediate_size"),
    }
    norm_eps = reader.number("rms_norm_eps", 1e-6)
    tied = reader.flag("tie_word_embeddings")
    rope_theta, rope_scaling = reader.rope()
    if not reader.wrong:
        reader.check_heads(given["dim"], heads, given["n_kv_heads"])
    if reader.wrong:
        raise WeightsError([f"{where}: {text}" for text in reader.wrong])
    return LlamaSize(**given, tie_embeddings=tied, norm_eps=norm_eps, rope_theta=rope_theta, rope_scaling=rope_scaling)


def refuse_other_architecture(config: Mapping[str, Any], where: Path) -> None:
    """Raises OtherArchitecture."""
    kind, names = config.get("model_type"), config.get("architectures") or [ARCHITECTURE]
    if kind == KIND and isinstance(names, list) and ARCHITECTURE in names:
        return
    found = f"architectures is {config.get('architectures')!r} and model_type {kind!r}"
    raise OtherArchitecture([f"{where}: {found}; only {ARCHITECTURE} of {KIND} is read"])


class _Reader:
    """Reads a config.json and keeps what is wrong with it. Defaults are those of transformers' LlamaConfig."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.wrong: list[str] = []

    def refuse_what_differs(self) -> None:
        """What would compute something else than Koushi's Llama."""
        for key, legal in (
            ("hidden_act", ("silu", "swish")),
            ("attention_bias", (False,)),
            ("mlp_bias", (False,)),
            ("attention_dropout", (0,)),
            ("partial_rotary_factor", (1,)),
            ("sliding_window", ()),
            ("quantization_config", ()),
        ):
            value = self.config.get(key)
            if value is not None and value not in legal:
                shown = "set" if isinstance(value, dict) else repr(value)
                needed = f"only {legal[0]!r} is computed" if legal else "it must be left out"
                self.wrong.append(f"{key} is {shown}; {needed}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        self.wrong.append(f"{key} is missing" if value is None else f"{key} is {value!r}; a count is needed")
        return 1

    def number(self, key: str, default: float, values: Mapping[str, Any] | None = None, within: str = "") -> float:
        value = (self.config if values is None else values).get(key)
        if value is None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
        self.wrong.append(f"{within}{key} is {value!r}; a number above 0 is needed")
        return default

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and not isinstance(value, bool):
            self.wrong.append(f"{key} is {value!r}; true or false is needed")
        return value is True

    def check_heads(self, dim: int, heads: int, kv_heads: int) -> None:
        if dim % heads or dim // heads % 2:
            self.wrong.append(f"{heads} num_attention_heads do not divide hidden_size {dim} into even parts")
            return
        if heads % kv_heads:
            self.wrong.append(f"{kv_heads} num_key_value_heads do not divide {heads} num_attention_heads")
        head_dim = self.count("head_dim", dim // heads)
        if head_dim != dim // heads:
            self.wrong.append(
                f"head_dim is {head_dim}; only hidden_size / num_attention_heads, here {dim // heads}, is computed"
            )

    def rope(self) -> tuple[float, RopeScaling | None]:
        """From ``rope_parameters``, as transformers 5 writes, or ``rope_theta`` and ``rope_scaling``, as 4 does."""
        key = "rope_parameters" if self.config.get("rope_parameters") else "rope_scaling"
        values = self.config.get(key) or {}
        if not isinstance(values, dict):
            self.wrong.append(f"{key} is {values!r}; an object is needed")
            return 0.0, None
        within = f"{key}."
        theta = self.number("rope_theta", self.number("rope_theta", 10_000.0), values, within)
        kind = values.get("rope_type", values.get("type", "default"))
        turned = values.get("partial_rotary_factor", 1)
        if turned != 1:
            self.wrong.append(f"{within}partial_rotary_factor is {turned!r}; only 1 is computed")
        if kind == "default":
            return theta, None
        if kind != "llama3":
            self.wrong.append(f"{within}rope_type is {kind!r}; only default and llama3 are computed")
            return theta, None
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        self.wrong.extend(f"{within}{name} is missing" for name in names if values.get(name) is None)
        factor, low, high, length = (self.number(name, 1.0, values, within) for name in names)
        if not self.wrong and high <= low:
            self.wrong.append(f"{within}high_freq_factor {high} is not above low_freq_factor {low}")
        scaling = RopeScaling(
            factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_seq_len=max(1, int(length))
        )
        return theta, scaling


def config_of(size: LlamaSize, *, dtype: str, max_seq_len: int, begin_id: int | None, end_id: Any) -> dict[str, Any]:
    """config.json of a Llama of ``size``, as transformers 4 and 5 and what reads their files take it."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": KIND,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": begin_id,
        "eos_token_id": end_id,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.dim,
        "initializer_range": 0.02,
        "intermediate_size": size.ffn_dim,
        "max_position_embeddings": max_seq_len,
        "mlp_bias": False,
        "num_attention_heads": size.n_heads,
        "num_hidden_layers": size.n_layers,
        "num_key_value_heads": size.n_kv_heads,
        "rms_norm_eps": size.norm_eps,
        "rope_scaling": None,
        "rope_theta": size.rope_theta,
        "tie_word_embeddings": size.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": size.vocab_size,
    }
    scaling = size.rope_scaling
    if scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return config
