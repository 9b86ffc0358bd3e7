"""Whatever is done to a run file, the answer is a job or a ConfigError with places."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koushi.check.check import check
from koushi.check.summary import summary
from koushi.config.load import load
from koushi.config.validate import legal_keys
from koushi.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
DEBUG = (EXAMPLES / "debug.yaml").read_text(encoding="utf-8")
PLACE = re.compile(r".*run\.yaml:[1-9]\d*:[1-9]\d*|command line \(.*\)", re.DOTALL)

VALUES = st.one_of(
    st.sampled_from(
        [
            "",
            "null",
            "~",
            "true",
            "no",
            "-1",
            "0",
            "1",
            "2",
            "3",
            "8",
            "1e3",
            "3e-4",
            ".nan",
            ".inf",
            "-.inf",
            "1e999",
            "'8'",
            "x",
            "[1, 2]",
            "[]",
            "{}",
            "{a: 1}",
            "[[[1]]]",
            "<<",
            "-",
            "!!python/name:os.system x",
            "&a x",
            "*a",
            "1F1B",
            "DualPipeV",
            "ZBVZeroBubble",
            "Interleaved1F1B",
            "float64",
            "bfloat16",
            "always",
            "text",
            "tokens",
            "synthetic",
            "llama3-405b",
            "99999999999999999999999",
            "1048576",
            "1000000000",
            "0x7fffffffffffffff",
            "2024-01-01",
            "1:30",
        ]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
# Globs and folders of the whole machine would be walked.
KEYS = [key for key in legal_keys() if key not in ("data.path", "run.folder", "data.tokenizer")]


def accepts_or_explains(text: bytes, overrides: list[str], world: int | None = None) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_bytes(text)
        try:
            job = check(load(path, overrides), world)
        except ConfigError as error:
            for problem in error.problems:
                assert PLACE.fullmatch(problem.where), problem
                assert problem.what, problem
        else:
            assert job.mesh.world_size == job.config.parallelism.world_size
            assert sum(len(stage) for stage in job.stages) == job.size.n_layers
            assert job.microbatches >= 1


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=6), st.none() | st.integers(1, 64))
def test_any_values_on_the_command_line(pairs: list[tuple[str, str]], world: int | None) -> None:
    accepts_or_explains(DEBUG.encode(), [f"{key}={value}" for key, value in pairs], world)


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), VALUES), min_size=1, max_size=4))
def test_any_values_in_the_file(changes: list[tuple[int, str]]) -> None:
    lines = [line for line in DEBUG.splitlines() if not line.lstrip().startswith("#")]
    for number, value in changes:
        at = number % len(lines)
        lines[at] = f"{lines[at].partition(':')[0]}: {value}"
    accepts_or_explains("\n".join(lines).encode("utf-8", "surrogatepass"), [])


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, len(DEBUG)), st.integers(0, 40), st.binary(max_size=6))
def test_any_bytes_in_the_file(start: int, length: int, inserted: bytes) -> None:
    data = DEBUG.encode()
    accepts_or_explains(data[:start] + inserted + data[start + length :], [])


@settings(max_examples=1500, deadline=None)
@given(st.text(max_size=60))
def test_any_text_as_a_file(text: str) -> None:
    accepts_or_explains(text.encode("utf-8", "surrogatepass"), [])


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=4))
def test_any_arguments(arguments: list[str]) -> None:
    accepts_or_explains(b"model:\n", [one for one in arguments if "path" not in one])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_legal(path: Path) -> None:
    job = check(load(path))
    assert str(job.mesh) in summary(job)


def test_the_examples_are_the_ones_that_are_written_about() -> None:
    assert check(load(EXAMPLES / "debug.yaml")).mesh.shape == (2, 1, 2, 1, 2)
    job = check(load(EXAMPLES / "llama_128.yaml"))
    assert (job.mesh.shape, job.mesh.world_size) == ((2, 2, 4, 1, 8), 128)
    assert job.size.n_kv_heads < job.mesh.degree("tp")
