"""Where every value comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from koushi.check.check import check
from koushi.check.explain import DERIVED, sources
from koushi.config.describe import keys
from koushi.config.load import load, load_config
from koushi.config.write import resolved_text
from koushi.models.llama.hf import config_of, hf_shapes
from koushi.models.llama.sizes import PRESETS
from koushi.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
RUN = """
model: {name: llama3-1b, n_layers: 12}
parallelism:
  data_parallel_shard_degree: -1
  pipeline_parallel_degree: 2
training: {global_batch_size: 64}
data: {source: jsonl, path: corpus.jsonl}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def explained(path: Path, *overrides: str, world: int | None = None) -> dict[str, str]:
    run_file = load(path, overrides)
    found = sources(run_file, check(run_file, world))
    return {key: source.replace(f"{path}:", "FILE:") for key, source in found.items()}


def test_every_kind_of_source(run: Path) -> None:
    found = explained(run, "training.steps=7", "--tp=1", "training.steps=9", world=8)
    assert found["model.name"] == "FILE:2:15"
    assert found["model.n_layers"] == "FILE:2:36"
    assert found["model.dim"] == "preset llama3-1b"
    assert found["model.rope_scaling.factor"] == "preset llama3-1b"
    assert found["model.hf"] == "default"
    assert found["training.seq_len"] == "default"
    assert found["training.steps"] == "command line (training.steps=9)"
    assert found["parallelism.tensor_parallel_degree"] == "command line (--tp=1)"
    assert found["parallelism.data_parallel_shard_degree"] == (
        "what the other degrees leave of a world of 8, for -1 at FILE:4:31"
    )
    assert found["parallelism.world_size"] == "the product of the degrees"
    assert found["parallelism.pipeline_parallel_stages_per_rank"] == "the fewest that 1F1B works with"
    assert found["parallelism.pipeline_parallel_layers_per_stage"] == (
        "12 layers over 2 stages, as even as possible with lighter ends"
    )
    assert found["parallelism.reshard_after_forward"] == "auto with a pipeline"
    assert found["data.path"] == "relative to the run file, for corpus.jsonl at FILE:7:29"


def test_without_a_pipeline(run: Path) -> None:
    found = explained(run, "--pp=1", "--dp-shard=1", "parallelism.reshard_after_forward=auto", "model.dim=null")
    assert found["parallelism.pipeline_parallel_stages_per_rank"] == "no pipeline, so one stage"
    assert found["parallelism.pipeline_parallel_layers_per_stage"] == "default"
    assert found["parallelism.reshard_after_forward"] == (
        "auto without a pipeline, for auto at command line (parallelism.reshard_after_forward=auto)"
    )
    assert found["model.dim"] == "preset llama3-1b, for null at command line (model.dim=null)"


def test_an_own_rope_scaling_has_the_schemas_defaults(run: Path) -> None:
    found = explained(run, "model.rope_scaling.factor=4", world=8)
    assert found["model.rope_scaling.factor"] == "command line (model.rope_scaling.factor=4)"
    assert found["model.rope_scaling.low_freq_factor"] == "default"
    assert "model.rope_scaling" not in found


def test_a_hugging_face_folder_gives_sizes_and_tokenizer(run: Path) -> None:
    folder = run.parent / "tiny"
    folder.mkdir()
    size = PRESETS["llama3-debug"]
    config = config_of(size, dtype="float32", max_seq_len=512, begin_id=None, end_id=1)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in hf_shapes(size).items()}, folder / "model.safetensors")
    shutil.copy(ROOT / "koushi" / "data" / "tokenizer.json", folder)
    run.write_text("model: {hf: tiny}\n")
    found = explained(run)
    assert found["model.hf"] == "relative to the run file, for tiny at FILE:1:13"
    assert found["model.dim"] == "tiny/config.json"
    assert found["data.tokenizer"] == "the one in the folder model.hf"
    found = explained(run, "data.tokenizer=tiny/tokenizer.json")
    assert found["data.tokenizer"].startswith("relative to the run file, for tiny/tokenizer.json at command line")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [2, 4])
def test_every_value_has_a_source_and_the_text_is_a_run_file(schedule: str, world: int, run: Path) -> None:
    run_file = load(run, [f"parallelism.pipeline_parallel_schedule={schedule}"])
    job = check(run_file, world)
    found = sources(run_file, job)
    assert set(found) == {key.name for key in keys() if not key.is_section}
    again = run.parent / "resolved.yaml"
    again.write_text(resolved_text(job.config, found), encoding="utf-8")
    assert load_config(again) == job.config
    assert check(load(again)).config == job.config


def test_every_rule_is_of_a_key() -> None:
    assert set(DERIVED) <= {key.name for key in keys()}
