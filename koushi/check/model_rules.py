"""Rules on the model: its sizes, and how tensor parallel divides them."""

from __future__ import annotations

from collections.abc import Iterator

from koushi.check.rule import (
    DIM,
    DP_SHARD,
    FFN,
    HEADS,
    HF,
    KV_HEADS,
    LAYERS,
    NAME,
    SEQ_LEN,
    TP,
    TP_OF_MODEL,
    VOCAB,
    Facts,
    Finding,
    Rule,
    divisors,
    listed,
    multiples_near,
)
from koushi.config.source import shown_text
from koushi.config.spelling import nearest
from koushi.errors import WeightsError
from koushi.models.llama.hf import check_folder
from koushi.models.llama.sizes import PRESETS, LlamaSize

MOST_LAYERS = 10_000


def legal_tensor_degrees(size: LlamaSize) -> tuple[int, ...]:
    """The tensor parallel degrees that divide every part of the model."""
    return tuple(
        tp
        for tp in divisors(size.n_heads)
        if kv_heads_fit(size.n_kv_heads, tp) and size.ffn_dim % tp == 0 and size.vocab_size % tp == 0
    )


def kv_heads_fit(n_kv_heads: int, tp: int) -> bool:
    """Whether KV heads can be cut over tp ranks, or each be copied to as many ranks."""
    return n_kv_heads % tp == 0 or tp % n_kv_heads == 0


def _hf(facts: Facts) -> Iterator[Finding]:
    if facts.hf is None:
        return
    model = facts.config.model
    try:
        size, _ = check_folder(facts.hf)
    except WeightsError as error:
        for reason in error.reasons:
            yield Finding((HF,), reason, "", (NAME,))
        return
    for key in size.__dataclass_fields__:
        given, own = getattr(model, key), getattr(size, key)
        if given is not None and given != own:
            yield Finding((f"model.{key}", HF), f"is {given}, but the model of {HF} has {own}", "leave it out")
    if facts.run_file.is_set(NAME) and model.name != type(model).model_fields["name"].default:
        yield Finding((NAME, HF), f"is {shown_text(model.name)} beside {HF}, which says the model", "leave it out")


def _name(facts: Facts) -> Iterator[Finding]:
    name = facts.config.model.name
    if name not in PRESETS:
        meant = nearest(name, PRESETS)
        guess = f"did you mean {meant}? " if meant else ""
        yield Finding(
            (NAME,), f"is {shown_text(name)}, not a model", f"{guess}The models are {', '.join(PRESETS)}", (NAME,)
        )


def _n_layers(facts: Facts) -> Iterator[Finding]:
    if facts.size.n_layers > MOST_LAYERS:
        yield Finding((LAYERS,), f"is {facts.size.n_layers}", f"at most {MOST_LAYERS} layers", (LAYERS,))


def _heads(facts: Facts) -> Iterator[Finding]:
    dim, heads = facts.size.dim, facts.size.n_heads
    keys = (HEADS, DIM, NAME)
    even = [one for one in divisors(dim) if dim // one % 2 == 0]
    legal = f"n_heads that divide {dim} into even parts: {listed(even)}" if even else "dim must be even"
    if dim % heads:
        yield Finding(keys, f"{heads} heads do not divide dim {dim}", legal)
    elif dim // heads % 2:
        yield Finding(keys, f"{heads} heads of dim {dim} are {dim // heads} wide, which rotary cannot halve", legal)


def _kv_heads(facts: Facts) -> Iterator[Finding]:
    heads, kv = facts.size.n_heads, facts.size.n_kv_heads
    if heads % kv:
        yield Finding(
            (KV_HEADS, HEADS, NAME),
            f"{kv} KV heads do not divide {heads} heads",
            f"n_kv_heads {listed(divisors(heads))}",
        )


def _rope(facts: Facts) -> Iterator[Finding]:
    scaling = facts.size.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Finding(
            ("model.rope_scaling.high_freq_factor", "model.rope_scaling.low_freq_factor"),
            f"high_freq_factor {scaling.high_freq_factor} is not above low_freq_factor {scaling.low_freq_factor}",
            f"a high_freq_factor above {scaling.low_freq_factor}",
        )


def _legal_tp(facts: Facts) -> str:
    return f"this model's tensor parallel degrees are {listed(legal_tensor_degrees(facts.size))}"


def _tp_heads(facts: Facts) -> Iterator[Finding]:
    tp, heads = facts.config.parallelism.tensor_parallel_degree, facts.size.n_heads
    if heads % tp == 0:
        return
    spoils = [TP_OF_MODEL]
    if facts.world is not None and facts.world % tp:  # then the world, too, only says what the heads say
        spoils.append(TP)
        if facts.shard_follows:
            spoils.append(DP_SHARD)
    yield Finding((TP, HEADS), f"{heads} heads do not divide over tp {tp}", _legal_tp(facts), tuple(spoils))


def _tp_kv_heads(facts: Facts) -> Iterator[Finding]:
    tp, kv = facts.config.parallelism.tensor_parallel_degree, facts.size.n_kv_heads
    if not kv_heads_fit(kv, tp):
        what = f"{kv} KV heads can be neither cut nor copied evenly over tp {tp}"
        yield Finding((TP, KV_HEADS), what, _legal_tp(facts))


def _tp_ffn(facts: Facts) -> Iterator[Finding]:
    tp, ffn = facts.config.parallelism.tensor_parallel_degree, facts.size.ffn_dim
    if ffn % tp:
        legal = f"ffn_dim {listed(multiples_near(ffn, tp))}; {_legal_tp(facts)}"
        yield Finding((FFN, TP), f"ffn_dim {ffn} does not divide over tp {tp}", legal)


def _tp_vocab(facts: Facts) -> Iterator[Finding]:
    tp, vocab = facts.config.parallelism.tensor_parallel_degree, facts.size.vocab_size
    least = facts.ids_needed or 1
    if vocab % tp and vocab >= least:  # a vocabulary too small for the tokenizer is told with a size that tp divides
        sizes = [size for size in multiples_near(vocab, tp) if size >= least]
        legal = f"vocab_size {listed(sizes)}; {_legal_tp(facts)}"
        yield Finding((VOCAB, TP), f"vocab_size {vocab} does not divide over tp {tp}", legal)


def _tp_sequence(facts: Facts) -> Iterator[Finding]:
    tp, length = facts.config.parallelism.tensor_parallel_degree, facts.config.training.seq_len
    if length % tp:
        legal = f"seq_len {listed(multiples_near(length, tp))}, or a tensor_parallel_degree that divides {length}"
        yield Finding(
            (SEQ_LEN, TP), f"seq_len {length} does not divide over tp {tp}, as sequence parallel needs", legal
        )


_MODEL_AND_TP = (NAME, HEADS, KV_HEADS, FFN, VOCAB, TP)

RULES = (
    Rule((HF,), _hf),
    Rule((NAME,), _name),
    Rule((NAME, LAYERS), _n_layers),
    Rule((NAME, DIM, HEADS), _heads),
    Rule((NAME, HEADS, KV_HEADS), _kv_heads),
    Rule(
        (NAME, "model.rope_scaling", "model.rope_scaling.high_freq_factor", "model.rope_scaling.low_freq_factor"),
        _rope,
    ),
    Rule(_MODEL_AND_TP, _tp_heads),
    Rule((*_MODEL_AND_TP, TP_OF_MODEL), _tp_kv_heads),
    Rule((*_MODEL_AND_TP, TP_OF_MODEL), _tp_ffn),
    Rule((*_MODEL_AND_TP, TP_OF_MODEL), _tp_vocab),
    Rule((SEQ_LEN, TP, TP_OF_MODEL), _tp_sequence),
)
