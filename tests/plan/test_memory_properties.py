"""What holds of the memory of any workload: no kind of bytes is negative, and the kinds add up."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from koushi.hardware.hardware import Hardware, load
from koushi.mesh import MeshSpec
from koushi.plan.memory import Memory, every_rank
from koushi.plan.workload import Transformer, Workload
from koushi.schedules import SCHEDULES, microbatches_fit

CPU = load("cpu")
BESIDES = ("moment", "pools", "fragmentation", "runtime")
KINDS = tuple(field.name for field in fields(Memory) if field.name not in BESIDES)
DTYPES = ("bfloat16", "float32", "float64")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small ones, over every kind of layout."""
    pp = draw(st.integers(1, 4))
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    needs = SCHEDULES[schedule]
    most = needs.most_stages_per_rank or 3
    n_stages = 1 if pp == 1 else pp * draw(st.integers(needs.fewest_stages_per_rank, most))
    layers = tuple(draw(st.lists(st.integers(0, 3), min_size=n_stages, max_size=n_stages)))
    microbatches = draw(st.integers(1, 12))
    assume(sum(layers) and (pp == 1 or microbatches_fit(schedule, pp, n_stages, microbatches)))
    tp = draw(st.sampled_from((1, 2)))
    kv_heads = draw(st.sampled_from((2, 4)))
    tied = pp == 1 and draw(st.booleans())
    vocab_size = draw(st.sampled_from((16, 994)))
    model = Transformer(sum(layers), 64, 4, kv_heads, 16, 192, vocab_size, tie_embeddings=tied)
    degrees = {name: draw(st.sampled_from((1, 2, 3))) for name in ("dp_shard", "dp_replicate")}
    return Workload(
        model,
        MeshSpec.of(pp=pp, tp=tp, cp=draw(st.sampled_from((1, 2))), **degrees),
        layers,
        schedule,
        draw(st.sampled_from((4, 64))),
        draw(st.integers(1, 2)),
        microbatches,
        draw(st.sampled_from(("none", "selective", "full"))),
        draw(st.booleans()),
        compute=draw(st.sampled_from(DTYPES)),
        reduce=draw(st.sampled_from(DTYPES)),
    )


@settings(max_examples=150, deadline=None)
@given(workloads(), st.sampled_from((CPU, None)))
def test_no_kind_of_memory_is_negative_and_all_add_up(workload: Workload, hardware: Hardware | None) -> None:
    for one in every_rank(workload, hardware):
        by_kind = {name: getattr(one, name) for name in KINDS}
        assert min(by_kind.values()) >= 0, one
        assert one.active == sum(by_kind.values())
        assert 0 < one.active <= one.reserved <= one.device
