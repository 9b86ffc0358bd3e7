"""The layouts that are accepted are exactly those that the written rules allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koushi.errors import Problem
from koushi.job import Job
from koushi.layout import divide_layers
from koushi.schedules import SCHEDULES, microbatches_fit, nearest_microbatches

WORLD = 16


def layouts(world: int) -> Iterator[tuple[int, int, int, int]]:
    """Every (pp, dp_replicate, dp_shard, tp) whose product is ``world``."""
    degrees = [degree for degree in range(1, world + 1) if world % degree == 0]
    for pp, replicate, shard, tp in product(degrees, repeat=4):
        if pp * replicate * shard * tp == world:
            yield pp, replicate, shard, tp


def is_legal(pp: int, split: int, tp: int, schedule: str, global_batch: int, microbatch: int) -> bool:
    """The rules for llama3-debug (8 heads, 4 KV heads, 6 layers; ffn, vocabulary and sequence are multiples of 64)."""
    if tp > 8 or global_batch % (split * microbatch):
        return False
    if pp == 1:
        return True
    count = global_batch // (split * microbatch)
    stages = pp if schedule in ("GPipe", "1F1B") else 2 * pp
    if stages > 6:
        return False
    if schedule == "1F1B":
        return count >= pp
    if schedule == "DualPipeV":
        return count >= 2 * pp
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return count < pp or count % (count // pp) == 0
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("global_batch", "microbatch"), [(16, 1), (12, 2), (7, 1), (40, 4)])
def test_every_layout_of_sixteen_devices(
    problems: Callable[..., tuple[Problem, ...]], schedule: str, global_batch: int, microbatch: int
) -> None:
    text = f"training: {{seq_len: 256, global_batch_size: {global_batch}, microbatch_size: {microbatch}}}\n"
    seen = 0
    for pp, replicate, shard, tp in layouts(WORLD):
        found = problems(
            f"{text}parallelism: {{pipeline_parallel_degree: {pp}, data_parallel_replicate_degree: {replicate}, "
            f"data_parallel_shard_degree: {shard}, tensor_parallel_degree: {tp}, "
            f"pipeline_parallel_schedule: {schedule}}}",
            world=WORLD,
        )
        legal = is_legal(pp, replicate * shard, tp, schedule, global_batch, microbatch)
        assert (found == ()) == legal, (pp, replicate, shard, tp, found)
        seen += 1
    assert seen == 35, "the 35 ways to write 16 as a product of four degrees"


def test_accepted_layouts_name_the_ranks_of_every_stage(checked: Callable[..., Job]) -> None:
    job = checked("training: {global_batch_size: 16}", "--pp", "2", "--dp-shard", "-1", "--tp", "8", world=32)
    assert job.mesh.shape == (2, 1, 2, 1, 8)
    assert (job.local_batch_size, job.microbatches) == (8, 8)


@given(st.integers(1, 400), st.integers(1, 200))
def test_layers_are_divided_evenly(n_layers: int, n_stages: int) -> None:
    if n_layers < n_stages - 2:
        with pytest.raises(ValueError, match="cannot be divided"):
            divide_layers(n_layers, n_stages)
        return
    layers = divide_layers(n_layers, n_stages)
    assert len(layers) == n_stages
    assert sum(layers) == n_layers
    assert min(layers) >= 0
    assert all(count >= 1 for count in layers[1:-1])
    if n_stages > 1:
        loads = [layers[0] + 1, *layers[1:-1], layers[-1] + 1]
        assert max(loads) - min(loads) <= 1
        assert loads[1:-1] == sorted(loads[1:-1], reverse=True), "the earliest middle stages hold more"


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "layers"),
    [
        (6, 1, (6,)),
        (6, 2, (3, 3)),
        (7, 2, (4, 3)),
        (6, 3, (2, 3, 1)),
        (6, 4, (1, 2, 2, 1)),
        (32, 4, (7, 9, 9, 7)),
        (31, 4, (7, 9, 8, 7)),
        (126, 16, (7, *[8] * 14, 7)),
        (4, 4, (0, 2, 2, 0)),
    ],
)
def test_divisions(n_layers: int, n_stages: int, layers: tuple[int, ...]) -> None:
    assert divide_layers(n_layers, n_stages) == layers


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 9), st.integers(1, 100))
def test_the_nearest_microbatches_fit(schedule: str, pp: int, count: int) -> None:
    stages = pp * SCHEDULES[schedule].fewest_stages_per_rank
    nearest = nearest_microbatches(schedule, pp, stages, count)
    assert all(microbatches_fit(schedule, pp, stages, one) for one in nearest)
    between = range(min(nearest) + 1, max(nearest))
    assert not any(microbatches_fit(schedule, pp, stages, one) for one in between)
    assert (nearest == (count,)) == microbatches_fit(schedule, pp, stages, count)
