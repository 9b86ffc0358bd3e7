"""Layouts beyond the powers of two, and what the enumeration keeps fixed: batches, stages, heads, recompute."""

from __future__ import annotations

from collections.abc import Iterator

from parity_cases import MULTI_STAGE, SCHEDULES, Case, batch, case, schedule, tied

# What divides by three: 6 heads, 3 KV heads, sizes of 36, 66 and 18.
THREES = (
    "model.n_heads=6",
    "model.n_kv_heads=3",
    "model.dim=36",
    "model.ffn_dim=66",
    "model.vocab_size=66",
    "training.seq_len=18",
    "training.global_batch_size=12",
    "training.microbatch_size=2",
)
# Over eight ranks: 20 rows are 3, ..., 3, 2 and 0; the KV head's 10 leave three ranks empty.
TWENTY = ("model.dim=20", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=26", "model.vocab_size=34")
NO_PIPELINE = ((1, 1, 1, 1), (1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (1, 2, 2, 1), (1, 1, 2, 2))


def accumulated() -> Iterator[Case]:
    """Several microbatches, of one and two samples."""
    for size in (1, 2):
        for degrees in (
            (1, 1, 1, 1),
            (1, 1, 2, 1),
            (1, 2, 1, 1),
            (1, 1, 1, 2),
            (1, 2, 2, 1),
            (1, 1, 2, 2),
            (1, 2, 1, 2),
        ):
            split = degrees[1] * degrees[2]
            yield case(f"5x{size}", degrees, *batch(5, size, split), tied(size == 2), "data.masked_fraction=0.8")
        for name in SCHEDULES:
            yield case(f"{name} 4x{size}", (2, 1, 2, 1), *schedule(name), *batch(4, size, 2), tied(True))
            yield case(f"{name} 8x{size}", (2, 1, 1, 2), *schedule(name), *batch(8, size))
    yield case("2x2", (1, 2, 2, 2), *batch(2, 2, 4), tied(True))
    for degrees in ((1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2)):
        kept = "parallelism.reshard_after_forward=never"
        yield case("3x1 kept gathered", degrees, *batch(3, 1, degrees[1] * degrees[2]), kept, tied(True))


def odd_microbatches() -> Iterator[Case]:
    """Counts of microbatches that are few, or no multiple of the pipeline's degree."""
    for name, pp, counts in (
        ("GPipe", 4, (1, 3)),
        ("1F1B", 4, (4, 5)),
        ("Interleaved1F1B", 4, (1, 2, 6)),
        ("LoopedBFS", 4, (1, 3)),
        ("InterleavedZeroBubble", 4, (1, 2, 6)),
        ("ZBVZeroBubble", 2, (1, 3)),
        ("ZBVZeroBubble", 4, (2, 5)),
        ("DualPipeV", 2, (4, 5)),
        ("DualPipeV", 4, (8, 9)),
    ):
        for count in counts:
            layers = f"model.n_layers={(2 * pp if name in MULTI_STAGE else pp) + 1}"
            yield case(f"{name} {count} microbatches", (pp, 1, 1, 1), *schedule(name), layers, *batch(count, 1))


def uneven_stages() -> Iterator[Case]:
    """Layers given stage by stage, none in the first or last among them."""
    given: tuple[tuple[int, str, tuple[tuple[int, ...], ...]], ...] = (
        (2, "GPipe", ((0, 5), (3, 0))),
        (2, "1F1B", ((1, 4), (4, 1), (0, 5), (5, 0), (0, 1), (1, 0))),
        (2, "Interleaved1F1B", ((0, 2, 3, 0), (3, 1, 1, 0), (1, 1, 1, 1))),
        (2, "LoopedBFS", ((0, 1, 1, 3),)),
        (2, "InterleavedZeroBubble", ((0, 3, 2, 0), (1, 2, 1, 0))),
        (2, "ZBVZeroBubble", ((0, 4, 1, 0), (2, 1, 1, 1))),
        (2, "DualPipeV", ((0, 1, 4, 0), (1, 1, 2, 1))),
        (4, "1F1B", ((0, 1, 4, 0), (0, 1, 1, 0), (2, 1, 1, 1))),
    )
    for pp, name, counts in given:
        for layers in counts:
            text = "-".join(map(str, layers))
            for ties in (False, True):
                label = f"{name} stages {text} {'tied' if ties else 'untied'}"
                yield case(label, (pp, 1, 1, 1), *schedule(name, *layers), tied(ties))
                if sum(layers) == 5:
                    cut = (pp, 1, 2, 1) if ties else (pp, 1, 1, 2)
                    yield case(label, cut, *schedule(name, *layers), tied(ties), "data.masked_fraction=0.8")
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        three = "parallelism.pipeline_parallel_stages_per_rank=3"
        yield case(f"{name} three a rank", (2, 1, 1, 1), *schedule(name, 0, 1, 1, 2, 1, 0), three, tied(True))
        yield case(f"{name} three a rank", (2, 1, 2, 1), *schedule(name), "model.n_layers=7", three)


def key_heads() -> Iterator[Case]:
    """KV heads as many as query heads, one, and numbers cut or copied by tp."""
    for tp, counts in ((2, (1, 4, 8)), (4, (1, 4, 8)), (8, (1, 4, 8))):
        for count in counts:
            yield case(f"kv{count}", (1, 1, 1, tp), f"model.n_kv_heads={count}", tied(count == 4))
    yield case("kv1", (1, 1, 2, 2), "model.n_kv_heads=1")
    yield case("kv1", (1, 1, 2, 4), "model.n_kv_heads=1", tied(True))
    yield case("kv1", (1, 2, 1, 4), "model.n_kv_heads=1")
    yield case("kv1", (2, 1, 1, 4), "model.n_kv_heads=1", *schedule("1F1B"), tied(True))


def odd_worlds() -> Iterator[Case]:
    """Degrees of three, five and six; shards that are uneven or empty."""
    for ties in (False, True):
        label = "tied" if ties else "untied"
        for degrees in ((1, 1, 3, 1), (1, 3, 1, 1), (1, 1, 1, 3)):
            yield case(label, degrees, *THREES, tied(ties))
        for name in SCHEDULES:
            layers = "model.n_layers=" + ("7" if name in MULTI_STAGE else "4")
            yield case(f"{name} {label}", (3, 1, 1, 1), *THREES, *schedule(name), layers, tied(ties))
        for degrees in ((1, 1, 3, 2), (1, 1, 2, 3), (1, 2, 3, 1), (1, 3, 2, 1), (1, 2, 1, 3), (1, 3, 1, 2)):
            kv = "model.n_kv_heads=" + ("6" if degrees[3] == 2 else "1")
            yield case(label, degrees, *THREES, kv, tied(ties), "data.masked_fraction=0.8")
        yield case(f"1F1B {label}", (3, 1, 2, 1), *THREES, *schedule("1F1B"), "model.n_layers=4", tied(ties))
        yield case(f"ZBVZeroBubble {label}", (2, 1, 3, 1), *THREES, *schedule("ZBVZeroBubble"), tied(ties))
        yield case(f"DualPipeV {label}", (2, 1, 1, 3), *THREES, *schedule("DualPipeV"), tied(ties))
        yield case(f"dim 20 {label}", (1, 1, 8, 1), *TWENTY, tied(ties))
        yield case(f"dim 20 {label}", (1, 1, 4, 2), *TWENTY, tied(ties))
        yield case(f"dim 20 {label}", (1, 2, 4, 1), *TWENTY, tied(ties))
        yield case(f"dim 20 1F1B {label}", (2, 1, 4, 1), *TWENTY, *schedule("1F1B"), tied(ties))
        yield case(f"dim 20 {label}", (1, 1, 5, 1), *TWENTY, *batch(2, 1, 5), tied(ties))


def recomputed() -> Iterator[Case]:
    """Activations computed again, under every kind of technique."""
    for how in ("full", "selective"):
        again = f"training.recompute={how}"
        for degrees in (*NO_PIPELINE, (1, 1, 1, 4)):
            yield case(how, degrees, again, tied(True))
        for name in SCHEDULES:
            yield case(f"{name} {how}", (2, 1, 1, 1), *schedule(name), again, tied(True))
            yield case(f"{name} {how}", (2, 1, 2, 1), *schedule(name), again)
        for name in ("1F1B", "ZBVZeroBubble"):
            yield case(f"{name} {how}", (2, 1, 2, 2), *schedule(name), again, tied(True))


GROUPS = {
    "accumulated": accumulated,
    "odd microbatches": odd_microbatches,
    "uneven stages": uneven_stages,
    "key heads": key_heads,
    "odd worlds": odd_worlds,
    "recomputed": recomputed,
}
