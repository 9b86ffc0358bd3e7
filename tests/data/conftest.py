"""Jobs made by hand, with a cache of their own for every test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from koushi.config.schema import JobConfig
from koushi.data import embedded
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import llama_size

MakeJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KOUSHI_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def embedded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture
def embedded_cache(embedded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache shared by the tests that want the embedded corpus, which takes seconds to prepare."""
    monkeypatch.setenv("KOUSHI_CACHE", str(embedded_folder))


@pytest.fixture(scope="session")
def embedded_documents() -> list[str]:
    return list(embedded.documents())


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """A job whose ``data`` section is the keywords; the other sections may be given as a dict."""

    def make(seq_len: int = 8, sections: dict[str, dict[str, Any]] | None = None, **data: Any) -> Job:
        config = JobConfig.model_validate({"training": {"seq_len": seq_len}, "data": data, **(sections or {})})
        return Job(
            config=config,
            size=llama_size(config.model),
            mesh=MeshSpec.of(),
            stages=(range(6),),
            name="test",
            base=tmp_path,
        )

    return make
