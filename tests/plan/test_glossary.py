"""docs/plan.md has every word that a plan prints."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from koushi.plan.memory import Memory
from koushi.plan.step_time import PARTS
from koushi.plan.text import KINDS

GLOSSARY = Path(__file__).resolve().parents[2] / "docs" / "plan.md"


def words() -> set[str]:
    rows = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {word for row in rows for word in row.split("|")[1].strip().split(", ")}


def test_every_part_of_a_step_is_explained() -> None:
    assert set(PARTS) <= words()


def test_every_kind_of_memory_is_explained() -> None:
    assert {name for _, name in KINDS} | {"active", "streams' pools", "reserved", "device"} <= words()
    text = GLOSSARY.read_text(encoding="utf-8")
    others = {one.name for one in fields(Memory)} - {key for key, _ in KINDS}
    assert {one for one in others if one not in text} == set()
