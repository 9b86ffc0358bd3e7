"""Odd worlds, uneven stages, batches in pieces, KV heads of every kind and recompute train as one process does."""

from __future__ import annotations

import pytest
from parity_cases import Case
from parity_run import References, chunks, failures, in_words
from parity_special import GROUPS

CHUNKS = [(name, cases) for name, made in GROUPS.items() for cases in chunks(made())]


def test_no_group_is_empty() -> None:
    for name, made in GROUPS.items():
        names = [one.name for one in made()]
        assert len(names) > 10, f"{name} has {len(names)} cases"
        assert len(set(names)) == len(names), f"{name} has two cases of one name"
    assert {name for name, _ in CHUNKS} == set(GROUPS)


# In float32 two of three: what only float32 shows depends on techniques, and every group has each of them often.
@pytest.mark.long
@pytest.mark.parametrize("dtype", ("float64", "float32"))
@pytest.mark.parametrize(
    "cases",
    [cases for _, cases in CHUNKS],
    ids=[f"{name} world{cases[0].world} {cases[0].name}" for name, cases in CHUNKS],
)
def test_special_layouts(cases: list[Case], dtype: str, references: References) -> None:
    chosen = cases if dtype == "float64" else [one for index, one in enumerate(cases) if index % 3 != 1]
    found = failures(chosen, dtype, references)
    assert not found, in_words(found)
