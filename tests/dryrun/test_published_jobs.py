"""Published runs of FSDP become jobs that run what they ran, or are left out for a stated reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from published_rows import row
from tiny import on_two_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.accuracy.published import Run, described
from koushi.accuracy.rows import Row
from koushi.dryrun.published import Likeness, every_other, is_fsdp, likeness, peak_of, torchs_loss_sum
from koushi.job import Job
from koushi.parallel import recompute, tensor

QWEN = {"model": "qwen3-32b", "hidden": "5120", "ffn": "25600", "heads": "64", "vocab": "151936", "layers": "64"}


def run_of(found: Row) -> Run:
    runs, left_out = described([found])
    assert not left_out, left_out[0].reason
    return runs[0]


def job(found: Row) -> Job:
    made = likeness(run_of(found))
    assert isinstance(made, Likeness), made
    return made.job


def test_an_fsdp_run() -> None:
    made = job(row(global_batch="32", micro_batch="2", zero_stage="2", compile="True"))
    training, precision = made.config.training, made.config.precision
    assert (made.mesh.degree("dp_shard"), made.mesh.world_size, made.microbatches) == (8, 8, 2)
    assert (training.recompute, training.compile, training.seq_len) == ("selective", False, 8192)
    assert (precision.parameters, precision.compute, precision.reduce) == ("float32", "bfloat16", "float32")
    assert made.config.parallelism.reshard_after_forward == "never"
    assert (made.size.dim, made.size.head_dim, made.size.tie_embeddings) == (4096, 128, False)


def test_a_pipeline() -> None:
    layout = {"pp": "4", "tp": "2", "gpus": "64", "vpp_schedule": "Interleaved1F1B", "notes": "virtual stages 2"}
    made = job(row(**layout, global_batch="64"))
    assert (made.mesh.shape, made.microbatches) == ((4, 1, 8, 1, 2), 8)
    assert sum(len(stage) for stage in made.stages) == 32


def test_heads_of_a_width_of_their_own() -> None:
    size = job(row(**QWEN, activation_ckpt="full")).size
    assert size.head_dim * size.n_heads == 8192 != size.dim


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"precision": "fp8-rowwise"}, "float8"),
        ({"notes": "SimpleFSDP aot_eager"}, "another FSDP"),
        ({"notes": "graph_trainer", "compile": "True"}, "another FSDP"),
        ({"notes": "chunked CE loss"}, "in pieces"),
        ({"compile": "True", "date": "2025-09"}, "compiled loss"),
        ({"cp": "2", "gpus": "16"}, "context parallel"),
        ({"model": "gpt-8b", "params_b": "", "ffn": "16384"}, "no Llama"),
        ({"source": "llm-foundry", "activation_ckpt": "selective-layer"}, "only some blocks"),
        ({"notes": "below; for the same throughputs"}, "two versions of its microbatch"),
        ({"notes": "looks like a source typo"}, "in doubt"),
    ],
)
def test_what_koushi_cannot_run_is_left_out_for_a_reason(cells: dict[str, str], reason: str) -> None:
    found = likeness(run_of(row(**cells)))
    assert isinstance(found, str) and reason in found


def test_runs_that_ran_the_same_are_run_dry_once() -> None:
    runs = [run_of(found) for found in (row(), row(compile="True", date="2025-02"), row(date="2025-11"))]
    assert len({likeness(run) for run in runs}) == 1


def test_the_family_is_what_shards_and_says_what_it_held() -> None:
    assert is_fsdp(row()) and is_fsdp(row(zero_stage="2"))
    assert not is_fsdp(row(zero_stage="1")) and not is_fsdp(row(peak_mem_gib=""))


class Matmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[object] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def matmuls(block: nn.Module) -> int:
    recompute.apply(block, "selective")
    with Matmuls() as seen:
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return seen.calls[torch.ops.aten.mm.default]


def test_torchtitans_recompute_makes_every_other_matmul_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())][:-1]
    own = matmuls(nn.Sequential(*layers))
    monkeypatch.setattr(recompute, "contexts", every_other)
    assert (own, matmuls(nn.Sequential(*layers))) == (9, 10)


def test_the_stand_ins_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recompute.contexts, tensor.token_loss_sum
    seen = []

    def trace(*args: object) -> object:
        seen.append((recompute.contexts, tensor.token_loss_sum))
        raise KeyError("seen")

    monkeypatch.setattr("koushi.dryrun.published.trace", trace)
    made = likeness(run_of(row(tp="2", dp_shard="4", global_batch="4")))
    assert isinstance(made, Likeness)
    with pytest.raises(KeyError, match="seen"):
        peak_of(made)
    assert seen == [(every_other, torchs_loss_sum)]
    assert before == (recompute.contexts, tensor.token_loss_sum)


def torchs_loss_is_the_same() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    labels = torch.tensor([[0, 5, 3, 7]])
    found = []
    for loss_of in (tensor.token_loss_sum, torchs_loss_sum):
        logits = torch.randn(1, 4, 4, generator=generator.manual_seed(dist.get_rank())).requires_grad_()
        with loss_parallel():
            loss = loss_of(logits, labels, mesh)
            loss.backward()
        assert logits.grad is not None
        found.append((loss.detach(), logits.grad))
    torch.testing.assert_close(*found)


def test_on_two_ranks(tmp_path: Path) -> None:
    assert on_two_ranks([torchs_loss_is_the_same], tmp_path) == {"torchs_loss_is_the_same": []}
