"""Units of data parallel: element counts by hand, uneven shards, what stages hold."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from koushi.layout import local_shape
from koushi.mesh import MeshSpec
from koushi.models.llama.layout import parameters
from koushi.models.llama.sizes import LlamaSize
from koushi.plan.units import block_unit, held_elsewhere, held_stages, stage_units, units_of
from koushi.plan.workload import Transformer, Workload

SIZE = LlamaSize(vocab_size=36, dim=12, n_layers=3, n_heads=6, n_kv_heads=2, ffn_dim=20)
MODEL = Transformer.of(SIZE)
ROWS = SIZE.dim


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("degree", (1, 2, 5, 8))
def test_shards_are_those_of_the_layout(tp: int, degree: int) -> None:
    """Every rank's count of elements is what the layout cuts for it, and padding makes all as large as the first."""
    degrees = {"tp": tp, "dp_shard": degree}
    shards = []
    for index in range(degree):
        units = stage_units(MODEL, tp, degree, index, SIZE.n_layers, first=True, last=True)
        shapes = [
            local_shape(one.shape, one.cuts, degrees, {"tp": 0, "dp_shard": index})
            for one in parameters(SIZE, tp).values()
        ]
        assert units.total.shard == sum(map(prod, shapes))
        shards.append(units.total)
    assert sum(one.shard for one in shards) == shards[0].whole
    assert shards[0].padded == shards[0].shard * degree
    assert {one.padded for one in shards} == {shards[0].padded}


def test_what_is_copied_over_tp() -> None:
    norms = 2 * SIZE.dim
    assert block_unit(MODEL, 2).copied == norms
    heads = 2 * 2 * 2 * SIZE.dim  # wk and wv of 2 heads of 2 channels
    assert block_unit(MODEL, 6).copied == norms + heads


def test_biases_and_two_matrices() -> None:
    gpt = replace(MODEL, gated=False, biases=True, layer_norm=True, n_kv_heads=6)
    dim, ffn = SIZE.dim, SIZE.ffn_dim
    assert block_unit(gpt, 1).whole == 4 * (dim * dim + dim) + 2 * dim * ffn + ffn + dim + 4 * dim


def test_ends_of_a_tied_model_share_a_unit_where_one_stage_has_both() -> None:
    tied = replace(MODEL, tie_embeddings=True)
    alone = stage_units(tied, 1, 1, 0, 3, first=True, last=True)
    assert alone.embedding is None
    assert alone.root.whole == SIZE.vocab_size * SIZE.dim + SIZE.dim
    apart = stage_units(tied, 1, 1, 0, 3, first=False, last=True)
    assert apart.root.whole == alone.root.whole


def workload(schedule: str, *layers: int) -> Workload:
    return Workload(MODEL, MeshSpec.of(pp=2), layers, schedule, 8, 1, 4)


def test_stages_of_a_rank() -> None:
    loops, v = workload("Interleaved1F1B", 1, 1, 1, 0), workload("ZBVZeroBubble", 1, 1, 1, 0)
    assert held_stages(loops, 1) == (1, 3)
    assert held_stages(v, 1) == (1, 2)
    assert [held_elsewhere(v, 1, 2), held_elsewhere(v, 0, 1), held_elsewhere(v, 3, 4)] == [False, True, False]
    assert held_elsewhere(loops, 1, 2)


def test_a_stage_without_layers_has_no_block() -> None:
    units = units_of(workload("ZBVZeroBubble", 1, 1, 1, 0), 3)
    assert [unit for unit, _ in units.all] == [units.root]
