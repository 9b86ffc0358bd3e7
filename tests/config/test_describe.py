"""Every key has a default, a type and a meaning that are those of the schema."""

from __future__ import annotations

import pytest

from koushi.config.describe import keys, schema_text
from koushi.config.schema import JobConfig, RopeScaling
from koushi.config.validate import legal_keys
from koushi.errors import ConfigError


def test_every_key_is_there_with_a_meaning() -> None:
    assert [key.name for key in keys()] == list(legal_keys())
    assert [key.name for key in keys() if not key.meaning.endswith(".")] == []
    assert [key.name for key in keys() if not key.is_section and not key.kind] == []


def test_defaults_are_those_of_an_empty_run_file() -> None:
    for key in keys():
        value: object = JobConfig()
        for name in key.name.split("."):
            value = RopeScaling() if name == "rope_scaling" else getattr(value, name)
        if not key.is_section:
            assert key.default == value, key.name


def test_types_in_words() -> None:
    kinds = {key.name: key.kind for key in keys()}
    assert kinds["training.steps"] == "an integer of at least 1"
    assert kinds["training.max_grad_norm"] == "a finite number above 0, or empty"
    assert kinds["training.recompute"] == "one of none, selective, full"
    assert kinds["model.tie_embeddings"] == "true or false, or empty"
    assert kinds["parallelism.pipeline_parallel_layers_per_stage"] == (
        "a list, each item an integer of at least 0, or empty"
    )


def test_the_schema_for_people() -> None:
    text = schema_text()
    assert text.startswith("model: Which model.")
    for key in keys():
        assert f"\n  {key.name}: " in text if not key.is_section else f"{key.name}: {key.meaning}" in text
    assert "\n  training.steps: 50\n      Optimizer steps of the whole run. An integer of at least 1.\n" in text
    assert schema_text(["training.steps"]) in text


def test_parts_of_the_schema() -> None:
    text = schema_text(["optimizer", "training.steps"])
    names = [line.strip().partition(":")[0] for line in text.splitlines() if line and not line.startswith("      ")]
    assert names == ["training.steps", "optimizer"] + [
        f"optimizer.{one}" for one in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")
    ]
    assert "model.rope_scaling.factor" in schema_text(["model.rope_scaling"])
    assert "model.name" not in schema_text(["model.rope_scaling"])


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as raised:
        schema_text(["optimiser", "steps", "run.yaml", "training.steps"])
    assert str(raised.value).splitlines() == [
        "command line: optimiser: is not a key of a run file; did you mean optimizer?",
        "command line: steps: is not a key of a run file; did you mean training.steps?",
        "command line: run.yaml: is not a key of a run file; the sections are model, parallelism, training, precision, "
        "optimizer, lr_schedule, data, validation, metrics, checkpoint, run, debug",
    ]
