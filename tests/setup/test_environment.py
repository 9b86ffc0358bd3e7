"""What a bug report needs, and no secrets."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

from koushi import __version__
from koushi.setup import environment
from koushi.setup.environment import dependencies, environment_text, relevant
from koushi.train.devices import devices_text

ROOT = Path(__file__).parents[2]


def test_versions_and_machine() -> None:
    text = environment_text()
    for name, shown in (
        ("koushi", __version__),
        ("python", f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro} "),
        ("memory", r"\d+\.\d\d [GT]iB"),
        ("cpus", r"\d+ for this process"),
        ("gpu", "."),
    ):
        assert re.search(rf"^{name} +{shown}", text, re.M), name
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", text, re.M)
    assert re.search(rf"^  click +{re.escape(metadata.version('click'))}$", text, re.M)
    assert "torch says" not in text
    assert "\ntorch says  one\ntorch says  two\n" in environment_text(["one", "two"])


def test_every_dependency_is_there() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = [one for extra in project["optional-dependencies"].values() for one in extra]
    named = {one.partition(">=")[0] for one in [*project["dependencies"], *extras]}
    assert len(named) > 10
    assert named == set(dependencies())


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.metadata, "requires", lambda name: ["gone>=1", "far[x]>2; extra == 'dev'"])
    assert dependencies() == {"gone": "missing", "far": "missing (an extra)"}


def test_variables_that_matter_without_secrets() -> None:
    variables = {
        "OMP_NUM_THREADS": "2",
        "NCCL_DEBUG": "INFO",
        "TORCH_LOGS": "+dynamo",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "MASTER_ADDR": "node0",
        "WORLD_SIZE": "8",
        "KOUSHI_CACHE": "https://me:hunter2@host/x",
        "NCCL_API_KEY": "hunter2",
        "TORCH_TOKEN": "hunter2",
        "CUDA_PASSWORD": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "HOME": "/home/me",
    }
    found = relevant(variables)
    assert "hunter2" not in str(found)
    assert found["KOUSHI_CACHE"] == "https://(not shown)@host/x"
    assert found["NCCL_API_KEY"] == "(not shown)"
    assert set(variables) - set(found) == {"AWS_SECRET_ACCESS_KEY", "HOME"}


def test_gpus_are_those_that_nvidia_smi_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '0, A card, 80 GiB, 1.2'\necho '1, A card, 80 GiB, 1.2'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "\ngpu       0, A card, 80 GiB, 1.2\ngpu       1, A card, 80 GiB, 1.2\n" in environment_text()
    command.write_text("#!/bin/sh\nexit 9\n")
    assert "nvidia-smi finds none" in environment_text()
    command.unlink()
    assert "no nvidia-smi here" in environment_text()


def test_what_torch_says() -> None:
    first, *others = devices_text()
    assert first.startswith(f"{torch.__version__}, built for ")
    assert len(others) >= max(1, torch.cuda.device_count())


def test_torch_is_not_imported_unless_asked() -> None:
    code = (
        "import sys; from koushi.setup.environment import environment_text as t; t(); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
