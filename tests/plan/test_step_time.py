"""The step's waterfall: it adds up, it never runs ahead of physics, and faster parts never make it slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from koushi.hardware.hardware import Hardware, load
from koushi.layout import divide_layers
from koushi.mesh import MeshSpec
from koushi.models.llama.flops import training_flops_per_token
from koushi.models.llama.sizes import PRESETS
from koushi.plan.communication import traffic
from koushi.plan.memory import memory
from koushi.plan.step_time import (
    PARTS,
    collective_times,
    edges,
    flops_per_token,
    pipeline,
    send_seconds,
    stage_costs,
    step_seconds,
    step_time,
    stragglers,
)
from koushi.plan.workload import System, Transformer, Workload


def workload(
    model: str = "llama3-8b", *, microbatches: int = 4, schedule: str = "1F1B", per_rank: int = 1, **degrees: int
) -> Workload:
    shapes, mesh = Transformer.of(PRESETS[model]), MeshSpec.of(**degrees)
    return Workload(
        model=shapes,
        mesh=mesh,
        stage_layers=divide_layers(shapes.n_layers, mesh.degree("pp") * per_rank),
        schedule=schedule,
        seq_len=8192,
        microbatch_size=1,
        microbatches=microbatches,
        recompute="selective",
        reshard_after_forward=mesh.degree("pp") == 1,
    )


LAYOUTS = {
    "one device": workload("llama3-1b"),
    "replicated": workload(dp_replicate=8),
    "sharded": workload(dp_shard=64),
    "hybrid": workload(dp_replicate=4, dp_shard=8),
    "tensor parallel": workload(tp=8),
    "both": workload("llama3-70b", dp_shard=16, tp=8),
    "pipeline": workload("llama3-70b", pp=4, dp_shard=4, tp=8, microbatches=16),
    "virtual stages": workload(
        "llama3-405b", pp=8, dp_shard=4, tp=8, schedule="Interleaved1F1B", per_rank=4, microbatches=16
    ),
    "zero bubble": workload("llama3-70b", pp=4, tp=8, schedule="ZBVZeroBubble", per_rank=2, microbatches=16),
    "overlapped": workload("llama3-70b", pp=4, tp=8, schedule="DualPipeV", per_rank=2, microbatches=16),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def faster(hardware: Hardware, times: float, **parts: str) -> Hardware:
    """With some fields of some parts (``chip``, ``inside``, ``network``) multiplied."""
    return replace(
        hardware,
        **{
            part: replace(getattr(hardware, part), **{field: times * getattr(getattr(hardware, part), field)})
            for part, field in parts.items()
        },
    )


@layouts
@pytest.mark.parametrize("name", ["h100", "a100", "gb200", "cpu"])
def test_the_waterfall_adds_up(layout: str, name: str) -> None:
    asked, hardware = LAYOUTS[layout], load(name)
    found = step_time(asked, hardware)
    assert set(found.parts) == set(PARTS)
    assert min(found.parts.values()) >= 0
    assert found.seconds == pytest.approx(step_seconds(asked, hardware))
    assert found.tokens_per_second_per_device == pytest.approx(asked.tokens / found.seconds / asked.mesh.world_size)
    for coordinate in range(asked.mesh.degree("pp")):
        assert step_time(asked, hardware, coordinate).seconds == pytest.approx(found.seconds)


@layouts
def test_no_step_beats_the_peak(layout: str) -> None:
    found = step_time(LAYOUTS[layout], load("h100"))
    assert 0.01 < found.mfu < load("h100").chip.sustained
    assert found.parts["ideal compute"] + found.parts["matmul shapes"] < found.seconds


@layouts
def test_what_is_faster_never_slows_a_step(layout: str) -> None:
    asked, plain = LAYOUTS[layout], load("h100")
    before = step_seconds(asked, plain)
    for change in ({"network": "gb_s"}, {"inside": "gb_s"}, {"chip": "memory_gb_s"}, {"chip": "attention_forward"}):
        assert step_seconds(asked, faster(plain, 2.0, **change)) <= before * (1 + 1e-9), change
    for change in ({"network": "hop_us"}, {"inside": "call_us"}, {"chip": "kernel_us"}, {"host": "launch_us"}):
        assert step_seconds(asked, faster(plain, 0.5, **change)) <= before * (1 + 1e-9), change


@layouts
def test_more_work_never_takes_less(layout: str) -> None:
    asked, hardware = LAYOUTS[layout], load("h100")
    before = step_seconds(asked, hardware)
    assert step_seconds(replace(asked, recompute="full"), hardware) >= before
    assert step_seconds(replace(asked, recompute="none"), hardware) <= before
    assert step_seconds(replace(asked, seq_len=2 * asked.seq_len), hardware) > before
    assert step_seconds(replace(asked, microbatches=2 * asked.microbatches), hardware) > before
    assert step_seconds(replace(asked, system=replace(asked.system, fused=True)), hardware) <= before


@layouts
def test_exposed_collectives_add_up_to_the_waterfall(layout: str) -> None:
    asked, hardware = LAYOUTS[layout], load("h100")
    for coordinate in range(asked.mesh.degree("pp")):
        parts = step_time(asked, hardware, coordinate).parts
        found = collective_times(asked, hardware, coordinate)
        assert {one.collective: one.calls for one in found} == dict(traffic(asked, coordinate))
        for name in ("tp", "dp_shard", "dp_replicate"):
            exposed = sum(one.exposed for one in found if one.collective.submesh.split(",")[0] == name)
            assert exposed == pytest.approx(parts[f"exposed {name}"])
            if name in ("dp_shard", "dp_replicate"):
                assert exposed <= sum(one.calls * one.seconds for one in found) * (1 + 1e-9)


def test_utilisation_counts_as_the_trainer_does() -> None:
    for size in PRESETS.values():
        shapes = Transformer.of(size)
        asked = replace(LAYOUTS["one device"], model=shapes)
        # The trainer counts the few values of norms as well.
        assert flops_per_token(asked) == pytest.approx(training_flops_per_token(size, 8192), rel=1e-3)


def test_one_pipeline_of_equal_stages_has_the_bubble_of_the_formula() -> None:
    """(p - 1) / (m + p - 1) where the ends weigh nothing: arXiv 2104.04473, section 2.2.1."""
    asked = workload("llama3-70b", pp=4, tp=8, microbatches=12)
    asked = replace(asked, model=replace(asked.model, vocab_size=8), stage_layers=(20, 20, 20, 20))
    near = replace(load("h100"), inside=replace(load("h100").inside, devices=0x10000))
    quick = faster(faster(near, 1e6, inside="gb_s"), 0.0, inside="call_us")
    assert pipeline(asked, quick, sending=False).bubble == pytest.approx(3 / 15, rel=0.01)


def test_a_small_model_on_many_ranks_is_bound_by_its_host() -> None:
    asked = replace(workload("llama3-1b", tp=8), seq_len=512)
    found = step_time(asked, load("h100"))
    assert found.parts["launch overhead"] > found.seconds / 6
    slower = faster(load("h100"), 2.0, host="launch_us")
    assert step_seconds(asked, slower) > 1.5 * found.seconds
    assert step_time(workload("llama3-70b", tp=8), load("h100")).parts["launch overhead"] == 0


def test_tensor_parallel_belongs_inside_a_node() -> None:
    hardware = load("h100")
    inside = step_time(workload("llama3-70b", dp_shard=2, tp=8), hardware).parts["exposed tp"]
    across = step_time(workload("llama3-70b", dp_shard=2, tp=16), hardware).parts["exposed tp"]
    assert across > inside, "though half of the heads and channels are left to a rank"
    assert step_time(workload("llama3-70b", dp_shard=2, tp=16), load("h100-efa")).parts["exposed tp"] > 1.2 * across
    rack = step_time(workload("llama3-70b", dp_shard=2, tp=16), load("gb200")).parts["exposed tp"]
    assert rack < across


def test_sharding_hides_behind_compute_until_the_network_is_too_slow() -> None:
    asked = workload(dp_shard=64, microbatches=1)
    exposed = [step_time(asked, load("h100").with_network(gb_s)).parts["exposed dp_shard"] for gb_s in (50, 5, 1, 0.25)]
    assert exposed == sorted(exposed)
    assert exposed[0] < 0.05 * step_seconds(asked, load("h100"))
    assert exposed[-1] > 10 * exposed[0]


def test_gradients_are_reduced_for_every_microbatch_but_copies_added_once() -> None:
    hardware = load("h100").with_network(0.5)

    def exposed(microbatches: int) -> dict[str, float]:
        return dict(edges(workload(dp_replicate=2, dp_shard=8, microbatches=microbatches), hardware, 0).exposed)

    once, four = exposed(1), exposed(4)
    assert four["exposed dp_shard"] == pytest.approx(4 * once["exposed dp_shard"], rel=0.05)
    assert four["exposed dp_replicate"] == pytest.approx(once["exposed dp_replicate"], rel=0.05)


def test_zero_one_gathers_what_it_updated() -> None:
    plain = replace(workload(dp_replicate=16), system=System(sharding="none"))
    zero = replace(plain, system=replace(plain.system, sharding="optimizer"))
    hardware = load("h100")
    assert step_time(zero, hardware).parts["optimizer"] < step_time(plain, hardware).parts["optimizer"]
    assert {one.collective.operation for one in collective_times(zero, hardware, 0) if one.collective.bytes > 1e6} == {
        "reduce_scatter",
        "all_gather",
    }


def test_zero_one_may_share_within_dp_shard_what_all_sum() -> None:
    hardware = load("h100")
    whole = replace(workload(dp_replicate=8, dp_shard=8), system=System(sharding="optimizer"))
    hybrid = replace(whole, system=replace(whole.system, hybrid=True))
    assert (whole.owners, hybrid.owners) == (("dp_replicate", "dp_shard"), ("dp_shard",))

    def large(asked: Workload) -> set[tuple[str, str]]:
        found = collective_times(asked, hardware, 0)
        return {(one.collective.submesh, one.collective.operation) for one in found if one.collective.bytes > 1e6}

    both = "dp_replicate,dp_shard"
    assert large(whole) == {(both, "reduce_scatter"), (both, "all_gather")}
    assert large(hybrid) == {(both, "all_reduce"), ("dp_shard", "all_gather")}
    parts, shared = (step_time(one, hardware).parts for one in (whole, hybrid))
    assert shared["optimizer"] > parts["optimizer"]
    state, held = (memory(one, 0, hardware) for one in (whole, hybrid))
    assert held.optimizer == pytest.approx(8 * state.optimizer, rel=1e-6)
    # Without replicas the two share alike.
    alone = replace(hybrid, mesh=MeshSpec.of(dp_shard=64))
    assert alone.owners == ("dp_shard",)


def test_zero_one_may_gather_at_once_or_owner_by_owner() -> None:
    hardware = load("h100")

    def exposed(replicas: int, how: Literal["by_unit", "at_once", "by_owner"]) -> float:
        system = System(sharding="optimizer", gathers_update=how, overlap_data_parallel=False)
        return edges(replace(workload(dp_replicate=replicas), system=system), hardware, 0).exposed[
            "exposed dp_replicate"
        ]

    # One call each way in place of 34; the host's 9 x 32 + 3 copies for each of 16 owners.
    call = (hardware.network.call_us + 15 * hardware.network.hop_us) * 1e-6
    copied = 16 * (9 * 32 + 3) * hardware.host.launch_us * 1e-6
    saved = exposed(16, "by_unit") - exposed(16, "at_once")
    assert saved == pytest.approx(2 * 33 * call - copied, rel=1e-6)
    # A broadcast for each owner: latency goes with the square of the owners.
    late = [exposed(replicas, "by_owner") - exposed(replicas, "by_unit") for replicas in (64, 256, 1024)]
    assert late[2] > 10 * late[1] > 0


def test_what_tp_gathers_in_float8_is_half_and_cast_by_the_piece() -> None:
    hardware = load("h100")
    wide = replace(workload("llama3-70b", tp=8), system=System(float8=True, fused=True))
    narrow = replace(wide, system=replace(wide.system, gathers_float8=True))
    before, after = step_time(wide, hardware).parts, step_time(narrow, hardware).parts
    # All-gathers, half of what tp sends, have half the bytes.
    assert after["exposed tp"] / before["exposed tp"] == pytest.approx(0.75, abs=0.05)
    assert after["memory-bound operations"] < 0.8 * before["memory-bound operations"]


def test_a_split_backward_recomputes_once_with_its_first_half() -> None:
    asked = replace(LAYOUTS["zero bubble"], recompute="full")
    hardware = load("h100")
    again = stage_costs(asked, hardware)[2], stage_costs(replace(asked, recompute="none"), hardware)[2]
    assert again[0].weights == again[1].weights
    assert again[0].inputs > again[1].inputs


def test_messages_shrink_with_what_tensor_parallel_cuts() -> None:
    hardware = load("h100")
    whole = send_seconds(workload(pp=4, dp_shard=8), hardware)
    cut = send_seconds(workload(pp=4, tp=8), hardware)
    assert cut < whole
    assert send_seconds(workload(pp=2, dp_shard=2), hardware) < whole, "within a node it is quicker"


def test_whole_activations_may_go_in_pieces_and_be_gathered() -> None:
    hardware, usual = load("h100"), workload(pp=4, tp=8)
    whole = replace(usual, system=System(sequence_parallel=False))
    cut = replace(usual, system=System(sequence_parallel=False, cut_sends=True))
    assert send_seconds(usual, hardware) < send_seconds(cut, hardware) < send_seconds(whole, hardware) / 2

    def sizes(asked: Workload) -> set[int]:
        return {one.bytes for one in traffic(asked, 1) if one.submesh == "pp" and one.operation == "send"}

    (size,) = sizes(whole)
    assert sizes(cut) == sizes(usual) == {size // 8}
    more = traffic(cut, 1) - traffic(whole, 1)
    gathers = {one: calls for one, calls in more.items() if one.submesh == "tp"}
    assert {one.operation for one in gathers} == {"all_gather"}
    assert sum(gathers.values()) == 2 * cut.microbatches, "a middle stage receives from both sides"


def test_the_slowest_of_many_sets_the_pace() -> None:
    hardware = load("h100")
    assert stragglers(hardware, 1) == 0
    assert 0 < stragglers(hardware, 8) < stragglers(hardware, 16384) < 0.1


def test_float8_is_faster_but_not_twice() -> None:
    plain = replace(workload("llama3-70b", tp=8), system=System(fused=True))
    quick = replace(plain, system=replace(plain.system, float8=True))
    assert min(step_time(quick, load("h100")).parts.values()) >= 0
    assert 1.1 < step_seconds(plain, load("h100")) / step_seconds(quick, load("h100")) < 1.8
