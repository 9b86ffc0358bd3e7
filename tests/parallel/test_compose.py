"""What techniques are told of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from tiny import tiny_job

from koushi.config.schema import DtypeName
from koushi.layout import Replicate, Shard
from koushi.models.llama.layout import REGIONS
from koushi.models.llama.model import Llama
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import precision
from koushi.parallel.compose import GlobalLoss, pipeline_options, tensor_parallel_options

SIZE = LlamaSize(vocab_size=32, dim=32, n_layers=2, n_heads=8, n_kv_heads=2, ffn_dim=24)


def test_kv_heads_are_cut_where_there_are_enough() -> None:
    options = tensor_parallel_options(SIZE, 2, 1)
    assert options.copied_rows == {}
    assert options.placements["layers.1.attention.wk.weight"] == Shard(0)
    assert tuple(options.regions) == REGIONS


@pytest.mark.parametrize(("tp", "heads"), [(4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_ranks_beyond_the_kv_heads_compute_with_that_of_their_queries(tp: int, heads: list[int]) -> None:
    for index, head in enumerate(heads):
        options = tensor_parallel_options(SIZE, tp, index)
        assert options.placements["layers.0.attention.wv.weight"] == Replicate()
        assert set(options.copied_rows) == {
            f"layers.{layer}.attention.{which}.weight" for layer in (0, 1) for which in ("wk", "wv")
        }
        assert set(map(str, options.copied_rows.values())) == {str(slice(head * 4, head * 4 + 4))}
        own_queries = range(index * 8 // tp, (index + 1) * 8 // tp)
        assert {query // 4 for query in own_queries} == {head}, "eight query heads share two KV heads, four each"


def test_a_tied_output_is_placed_by_its_own_name() -> None:
    assert "output.weight" in tensor_parallel_options(replace(SIZE, tie_embeddings=True), 2, 0).placements


def test_shapes_between_stages(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--pp", "2", "--tp", "2", "training.microbatch_size=2", "precision.compute=bfloat16")
    options = pipeline_options(job, torch.device("cpu"))
    assert (options.schedule, options.n_stages, options.microbatches) == ("1F1B", 2, 2)
    assert (options.tokens, options.activations, options.logits) == ((2, 8), (2, 4, 16), (2, 8, 16))
    assert options.compute == torch.bfloat16


def test_the_loss_is_a_share_of_the_global_mean() -> None:
    loss = GlobalLoss(None)
    logits, labels = torch.zeros(1, 4, 8), torch.tensor([[0, 1, -100, 3]])
    loss.total = torch.tensor(12)
    assert loss(logits, labels).item() == pytest.approx(3 * torch.tensor(8.0).log().item() / 12)


def test_every_dtype_of_a_run_file_is_known() -> None:
    assert set(precision.DTYPES) == set(get_args(DtypeName))
    assert all(str(dtype) == f"torch.{name}" for name, dtype in precision.DTYPES.items())


def test_mixed_precision_is_the_dtype_of_activations() -> None:
    model = precision.apply(Llama(SIZE, 4), torch.bfloat16)
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.part(range(1, 2), first=False, last=True).compute_dtype == torch.bfloat16
