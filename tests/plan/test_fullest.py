"""A schedule added up once for all shards gives the same peaks as going through it for each."""

from __future__ import annotations

import re

import pytest
from every_situation import every_situation

from koushi.plan.fullest import (
    action_span,
    alike_stages,
    counted_bytes,
    habits_of,
    own_kinds,
    pipelined_span,
    sent_of,
)
from koushi.plan.layouts import layers_of, mesh_of
from koushi.plan.pipelined import buffer_bytes, reduction
from koushi.plan.schedule import order_of_rank
from koushi.plan.situations import COUNTED, Situation
from koushi.plan.spans import GRADIENTS, STREAMS, Span
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Transformer, Workload

MODEL = Transformer(n_layers=11, dim=256, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=704, vocab_size=1000)
SCHEDULES = [
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("LoopedBFS", 3),
    ("InterleavedZeroBubble", 5),
    ("ZBVZeroBubble", 2),
    ("DualPipeV", 2),
]


def workload_of(schedule: str, per_rank: int, replicas: int, shards: int) -> Workload:
    return Workload(
        model=MODEL,
        mesh=mesh_of(2, replicas, shards, 1),
        stage_layers=layers_of(MODEL.n_layers, 2 * per_rank),
        schedule=schedule,
        seq_len=128,
        microbatch_size=1,
        microbatches=6,
    )


def one_by_one(workload: Workload, pp: int) -> list[tuple[Situation, int, int, int]]:
    """Of every situation of a rank: bytes at the highest, of all but gradients' shards, of these alone."""
    stages = alike_stages(workload, pp, "gpu")
    shards, replicas = workload.mesh.degree("dp_shard"), workload.mesh.degree("dp_replicate")
    sent = [sent_of(workload, one.index, one.stage) for one in stages]
    habits = habits_of(workload, stages)
    shape = workload.schedule, 2, len(workload.stage_layers), workload.microbatches
    found = []
    order, kinds = order_of_rank(*shape, pp), own_kinds(workload, pp).by_stage
    for one in every_situation(order, workload.microbatches, habits, kinds):
        stage = stages[one.kind].stage
        span = reduction(stage, shards, replicas, one.first, one.late) if one.step == "R" else action_span(stage, one)
        own, gathered = span.stream_highest[STREAMS.index(GRADIENTS)], []
        highest, compute = span.highest, span.compute_highest
        for kind, alike in enumerate(stages):
            for what in COUNTED:
                each = counted_bytes(alike.stage, sent[kind])[what]
                count = one.counts[what * len(stages) + kind]
                highest += count * sum(each)
                compute += count * (sum(each) - each[GRADIENTS])
                own += count * each[GRADIENTS]
            padded = alike.stage.units(shards).total.padded
            whole = alike.stage.whole * alike.stage.master
            done = one.reduced[kind] * (padded // shards * alike.stage.master if alike.stage.fsdp else whole)
            highest, own = highest + done, own + done
            gathered += [padded * alike.stage.compute * alike.stage.fsdp] * (alike.count - one.reduced[kind])
        there = sum(sorted(gathered)[-MOST_UNSHARDED:])
        found.append((one, highest + there, compute + there, own))
    return found


@pytest.mark.parametrize(("schedule", "per_rank"), SCHEDULES)
def test_the_same_as_going_through_every_situation(schedule: str, per_rank: int) -> None:
    seen: set[int] = set()
    for replicas, shards in ((1, 1), (1, 2), (2, 2), (1, 6), (4, 1)):
        workload = workload_of(schedule, per_rank, replicas, shards)
        for pp in (0, 1):
            stages = alike_stages(workload, pp, "gpu")
            span: Span = pipelined_span(workload, pp, stages)
            every = one_by_one(workload, pp)
            buffers = sum(one.count * buffer_bytes(workload, one.stage) for one in stages)
            highest = max(each[1] for each in every)
            moments = {(one.stage, one.in_flight) for one, total, *_ in every if total == highest}
            assert span.highest == sum(span.peak) == highest + buffers
            assert span.compute_highest == max(each[2] for each in every) + buffers
            assert span.stream_highest[STREAMS.index(GRADIENTS)] == max(each[3] for each in every)
            stage, in_flight = (
                int(number) for number in re.findall(r"stage (\d+) .* with (\d+) microb", span.moment)[0]
            )
            assert (stage, in_flight) in moments
            seen.add(span.highest)
    assert len(seen) >= 5
