"""Published runs become the workloads that their pages describe, or are left out for a stated reason."""

from __future__ import annotations

import csv
import gzip
import io
import random
from dataclasses import replace
from math import isfinite

import pytest
from published_rows import row

from koushi.accuracy.published import LeftOut, Run, described, megatron_flops
from koushi.accuracy.rows import FAILED, MEASURED, Row, read
from koushi.accuracy.score import score
from koushi.accuracy.stages import by_cost
from koushi.plan.memory import every_rank, memory
from koushi.plan.workload import Transformer


def run_of(found: Row) -> Run:
    runs, left_out = described([found])
    assert not left_out, left_out[0].reason
    return runs[0]


def reason_of(found: Row) -> str:
    runs, left_out = described([found])
    assert not runs
    return left_out[0].reason


def test_an_fsdp_run() -> None:
    run = run_of(row())
    workload = run.workload
    assert workload.mesh.degree("dp_shard") == workload.mesh.world_size == 8
    assert (workload.microbatches, workload.microbatch_size, workload.stage_layers) == (1, 1, (32,))
    assert (workload.recompute, workload.reshard_after_forward, workload.reduce) == ("selective", True, "float32")
    assert workload.system.kept_matmuls == 0.5
    assert run.step_seconds == pytest.approx(8192 / 6000)
    assert (run.memory, run.memory_gib) == ("reserved", 47.5)


def test_accumulation_and_zero_2() -> None:
    workload = run_of(row(global_batch="32", zero_stage="2")).workload
    assert workload.microbatches == 4
    assert not workload.reshard_after_forward


def test_a_group_that_shares_the_optimizers_state_is_dp_shard() -> None:
    cells = {"source": "internevo", "gpus": "64", "dp_replicate": "64", "dp_shard": "1", "zero_stage": "1"}
    within = run_of(row(**cells, global_batch="64", notes="zero1 group=8; micro_num 1")).workload
    among = run_of(row(**cells, global_batch="64", notes="zero1 group=all DP; micro_num 1")).workload
    assert (within.mesh.degree("dp_replicate"), within.mesh.degree("dp_shard")) == (8, 8)
    assert (among.mesh.degree("dp_replicate"), among.mesh.degree("dp_shard")) == (64, 1)
    assert (within.owners, among.owners) == (("dp_shard",), ("dp_replicate", "dp_shard"))
    assert within.tokens == among.tokens


def test_the_stated_step_time_goes_before_tokens_per_second() -> None:
    assert run_of(row(step_time_s="1.5")).step_seconds == 1.5


def test_degrees_that_are_not_stated_follow_from_the_devices() -> None:
    sharded = run_of(row(dp_replicate="", dp_shard="", tp="2", global_batch="4")).workload.mesh
    assert (sharded.degree("dp_shard"), sharded.degree("dp_replicate")) == (4, 1)
    copied = run_of(row(source="megatron-bridge", dp_replicate="", dp_shard="", zero_stage="")).workload.mesh
    assert (copied.degree("dp_shard"), copied.degree("dp_replicate")) == (1, 8)


def test_a_microbatch_that_is_not_stated_is_the_local_batch_of_fsdp() -> None:
    assert run_of(row(micro_batch="", global_batch="16")).workload.microbatch_size == 2
    assert "microbatch is not stated" in reason_of(row(micro_batch="", zero_stage="1", dp_shard="1", dp_replicate="8"))


def test_virtual_stages_and_layers_that_the_ends_replace() -> None:
    interleaved = {"pp": "8", "tp": "8", "gpus": "1024", "vpp_schedule": "vp=8", "layers": "126", "global_batch": "512"}
    workload = run_of(
        row(source="dgxc-benchmarking", dp_replicate="16", dp_shard="1", model="llama3.1-405b", **interleaved)
    ).workload
    assert (workload.schedule, workload.stages_per_rank) == ("Interleaved1F1B", 8)
    assert workload.stage_layers == (1, *[2] * 62, 1)


def test_stages_that_notes_describe() -> None:
    bloom = {
        "source": "bigscience-bloom",
        "model": "gpt-182b",
        "layers": "78",
        "hidden": "13824",
        "ffn": "55296",
        "heads": "96",
        "kv_heads": "96",
        "vocab": "",
        "seq_len": "2048",
        "gpu": "a100-sxm-80gb",
        "gpus": "384",
        "nodes_gpus_per_node": "48x8",
        "dp_replicate": "8",
        "dp_shard": "1",
        "tp": "4",
        "pp": "12",
        "micro_batch": "2",
        "global_batch": "2048",
        "precision": "fp16",
        "zero_stage": "1",
        "activation_ckpt": "full",
    }
    uneven = run_of(row(**bloom, notes="Mem=nvidia-smi GB; 78/12 uneven stages (last stage 1 layer)"))
    assert uneven.workload.stage_layers == (*[7] * 11, 1)
    assert uneven.memory == "device"
    assert (uneven.workload.model.vocab_size, uneven.workload.model.learned_positions) == (250_880, 0)
    assert (uneven.workload.compute, uneven.workload.reduce) == ("float16", "float16")
    # Four adapters, of each of which NCCL had 40.5 Gb/s, for eight devices.
    assert uneven.hardware.network.bandwidth == pytest.approx(4 * 40.5e9 / 8 / 8)
    balanced = run_of(row(**(bloom | {"layers": "70"}), notes="partition type:transformer|embed; fp32 grad"))
    assert balanced.workload.stage_layers == (5, *[6] * 10, 5)


def test_nanotron_divides_by_multiplications() -> None:
    model = Transformer(16, 2048, 32, 32, 64, 8192, 131072, tie_embeddings=True)
    # The output projection weighs four of these layers.
    assert by_cost(model, 1) == (16,)
    # A rank whose share is met to the last block takes no further one.
    assert by_cost(model, 2) == (10, 6)
    assert by_cost(model, 4) == (5, 5, 5, 1)
    assert by_cost(replace(model, vocab_size=100_352), 2) == (10, 6)
    assert by_cost(replace(model, vocab_size=132_096), 2) == (11, 5)


def test_qwen3_has_heads_of_128() -> None:
    sizes = {"hidden": "5120", "ffn": "25600", "heads": "64", "layers": "64", "vocab": "151936", "params_b": "32.8"}
    model = run_of(row(model="qwen3-32b", **sizes)).workload.model
    assert model.head_dim == 128


def test_an_unknown_model_is_described_by_its_sizes() -> None:
    plain = run_of(row(model="somebody's-9b", ffn="16384", source="elsewhere")).workload.model
    assert not plain.gated and plain.tie_embeddings
    assert run_of(row(model="somebody's-9b", source="elsewhere")).workload.model.gated


def test_float8_runs() -> None:
    assert run_of(row(precision="fp8-tensorwise")).workload.system.float8
    assert not run_of(row()).workload.system.float8


def test_what_torchtitans_selective_recompute_keeps() -> None:
    def kept(notes: str) -> tuple[float, bool]:
        system = run_of(row(activation_ckpt="selective", notes=notes)).workload.system
        return system.kept_matmuls, system.keeps_every_output

    assert kept("FSDP2 eager") == (0.5, True)
    assert kept("SimpleFSDP aot_eager") == (0.5, False)
    assert kept("graph_trainer memory_policy=default") == (1.0, False)


def test_torchtitans_loss_in_pieces() -> None:
    def pieces(date: str, notes: str = "chunked CE loss") -> tuple[int, bool]:
        system = run_of(row(date=date, notes=notes)).workload.system
        return system.loss_chunks, system.whole_logits

    assert pieces("2025-03") == (8, True)
    assert pieces("2026-05") == (8, False)
    assert pieces("2025-03", "baseline CE loss") == (1, False)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"moe": "True"}, "mixture of experts"),
        ({"ep": "8"}, "mixture of experts"),
        ({"gpu": "tpu-v5p"}, "TPU"),
        ({"gpu": "gtx-9000"}, "no hardware file for gtx-9000"),
        ({"gpu": ""}, "no hardware file for an unnamed device"),
        ({"layers": ""}, "the model's sizes are not stated"),
        ({"heads": "7"}, "the heads do not divide the model's width"),
        ({"params_b": "70"}, "the sizes and the stated number of parameters disagree"),
        ({"gpus": ""}, "the number of devices is not stated"),
        ({"tp": "4"}, "the degrees do not multiply to the number of devices"),
        ({"global_batch": "12"}, "the global batch is no whole number of microbatches"),
        ({"global_batch": "", "zero_stage": "1"}, "the global batch is not stated"),
        ({"seq_len": ""}, "sequence length or microbatch is not stated"),
        ({"pp": "2", "dp_shard": "4", "vpp_schedule": "interleaved"}, "how many virtual stages"),
        ({"notes": "SGD optimizer, CPU param offload"}, "state offloaded to the host"),
        ({"model": "llama2-7b-lora"}, "fine-tuning on packed samples"),
    ],
)
def test_rows_left_out(cells: dict[str, str], reason: str) -> None:
    assert reason in reason_of(row(**cells))


def test_spoiled_measurements_still_show_that_a_run_ran() -> None:
    slow = run_of(row(mfu_pct="1.4"))
    assert slow.spoiled == "below 2% MFU"
    assert slow.step_seconds is None and slow.memory_gib is None


def test_a_run_much_slower_than_its_twin_is_no_measure_of_time() -> None:
    cells = {"source": "hf-ultrascale", "dp_replicate": "8", "dp_shard": "1", "vocab": "131072", "kv_heads": "32"}
    fast, slow = (row(**cells, model="nanotron-8b", zero_stage=stage) for stage in ("0", "1"))
    runs, _ = described([fast, row(**cells, model="nanotron-8b", zero_stage="1", tokens_per_s_per_gpu="2000")])
    assert [run.step_seconds is None for run in runs] == [False, True]
    runs, _ = described([fast, slow])
    assert [run.step_seconds is None for run in runs] == [False, False]


NANOTRON = {
    "source": "hf-ultrascale",
    "model": "nanotron-8b",
    "vocab": "131072",
    "kv_heads": "32",
    "seq_len": "4096",
    "dp_shard": "1",
    "zero_stage": "0",
    "global_batch": "256",
}


def test_more_replicas_make_no_microbatch_faster() -> None:
    # Half of the replicas have twice the microbatches: at most twice the time, whatever the other run took.
    def nanotron(replicas: int, seconds: str) -> Row:
        cells = NANOTRON | {"gpus": str(replicas), "dp_replicate": str(replicas), "step_time_s": seconds}
        return row(**cells, nodes_gpus_per_node=f"{replicas // 8}x8")

    def kept(*rows: Row) -> list[bool]:
        return [run.step_seconds is not None for run in described(rows)[0]]

    assert kept(nanotron(16, "3.9"), nanotron(32, "1.0")) == [True, True]
    assert kept(nanotron(16, "4.1"), nanotron(32, "1.0")) == [False, True]
    # Fewer replicas say nothing of more, which have more to send.
    assert kept(nanotron(16, "1.0"), nanotron(32, "1.9")) == [True, True]


def test_how_far_nanotrons_host_is_ahead() -> None:
    """1,024 launches, which are 25 blocks, or all that there is to launch; where a pipeline's host stalls, what follows
    the second microbatch in flight."""

    def ahead(pp: int, tp: int, size: int, gpus: int = 64, microbatches: int = 8) -> int:
        replicas = gpus // (pp * tp)
        cells = {"gpus": str(gpus), "nodes_gpus_per_node": f"{gpus // 8}x8", "tp": str(tp), "pp": str(pp)}
        cells |= {"dp_replicate": str(replicas), "micro_batch": str(size)}
        return run_of(
            row(**NANOTRON | cells | {"global_batch": str(replicas * size * microbatches)})
        ).workload.system.blocks_ahead

    assert [ahead(1, tp, 1) for tp in (1, 8)] == [0, 25]
    assert [ahead(pp, 8, 1) for pp in (2, 4, 8)] == [0, 9 * 2, 25]
    # A device that takes longer for a block than the host is never waited for, nor is a pipeline within a node stalled.
    assert ahead(2, 8, 16) == ahead(2, 2, 1, gpus=8) == 25
    assert ahead(4, 8, 1, microbatches=3) == 9


def test_nanotrons_slow_version_is_told_by_its_memory() -> None:
    cells = NANOTRON | {"gpus": "16", "nodes_gpus_per_node": "2x8", "tp": "16", "dp_replicate": "1"}
    found = score(run_of(row(**cells, micro_batch="8")))
    without = replace(found.run.workload, system=replace(found.run.workload.system, blocks_ahead=0))
    beside = memory(without, 0, found.run.hardware).reserved / 2**30
    assert beside < 0.7 * found.memory_gib

    def spoiled(gib: float, size: str = "8") -> str | None:
        return run_of(row(**cells, micro_batch=size, peak_mem_gib=f"{gib:.1f}")).spoiled

    assert spoiled(found.memory_gib) is None and spoiled(0.95 * found.memory_gib) is None
    assert "stalls tensor parallel" in (spoiled(beside) or "")
    # What was gathered would not have fit, so that it cannot have been kept.
    assert "stalls tensor parallel" in (spoiled(70.0, size="32") or "")


def test_nanotrons_memory_is_that_of_its_first_stage() -> None:
    layout = {"gpus": "16", "nodes_gpus_per_node": "2x8", "pp": "2", "dp_replicate": "8", "micro_batch": "8"}
    run = run_of(row(**(NANOTRON | layout | {"zero_stage": "1", "global_batch": "64"})))
    first, last = every_rank(run.workload, run.hardware)
    assert first.reserved < last.reserved, "the last has the logits"
    assert score(run).memory_gib == first.reserved / 2**30
    assert score(replace(run, memory_of_first=False)).memory_gib == last.reserved / 2**30


def test_megatron_counts_a_recomputed_forward() -> None:
    # arXiv 2104.04473, table 1: 145.6B, 2304 samples, 148 TFLOP/s on 1536 devices.
    sizes = {"layers": "80", "hidden": "12288", "ffn": "49152", "heads": "96", "kv_heads": "96", "vocab": "51200"}
    layout = {"gpus": "1536", "tp": "8", "pp": "8", "dp_replicate": "24", "dp_shard": "1", "global_batch": "2304"}
    cells = {"source": "megatron-sc21", "model": "gpt-145.6b", "seq_len": "2048", "zero_stage": "", "precision": "fp16"}
    run = run_of(row(**sizes, **layout, **cells, tokens_per_s_per_gpu="", tflops_per_gpu="148"))
    flops = megatron_flops(run.workload)
    # 6 per parameter and token for forward and backward, 2 more for the forward done again.
    assert flops == pytest.approx(8 * 145.6e9 * run.workload.tokens, rel=0.03)
    assert run.step_seconds == pytest.approx(flops / (148e12 * 1536))


def test_every_shipped_row_is_one_or_the_other() -> None:
    for path in (MEASURED, FAILED):
        rows = read(path)
        runs, left_out = described(rows)
        assert len(runs) + len(left_out) == len(rows)
        assert all(isinstance(one, LeftOut) and one.reason for one in left_out)


def test_rows_with_cells_missing_or_wrong_never_raise() -> None:
    chance = random.Random(0)
    cells = list(csv.DictReader(io.StringIO(gzip.decompress(MEASURED.read_bytes()).decode())))
    columns = list(cells[0])
    rows = []
    for source in chance.sample(cells, 150):
        spoiled = dict(source)
        for column in chance.sample(columns, chance.randint(1, 6)):
            spoiled[column] = chance.choice(["", "?", "0", chance.choice(cells)[column]])
        rows.append(Row.of(spoiled))
    runs, left_out = described(rows)
    assert runs and left_out
    for run in runs:
        found = score(run)
        assert isfinite(found.step_seconds) and found.step_seconds > 0 and found.memory_gib > 0
