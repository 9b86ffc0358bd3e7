"""docs/hardware.md has every key of a hardware file, where it belongs, and its default."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import MISSING
from pathlib import Path

import pytest

from koushi.errors import ConfigError
from koushi.hardware.hardware import Chip, Hardware, Host, Link, load

TEXT = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
SECTIONS = {
    "The cluster": Hardware,
    "chip: one device": Chip,
    "host: what feeds a device": Host,
    "inside and network: links": Link,
}


def defaults(kind: type) -> dict[str, str]:
    words = {(): "none", False: "false", 1.0: "1", MISSING: ""}
    return {one.name: words.get(one.default, str(one.default)) for one in dataclasses.fields(kind)}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_key_is_explained(title: str) -> None:
    section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = {}
    for names, default in re.findall(r"^\| (`.*?`) \| .* \| ?(.*?) ?\|$", section, re.MULTILINE):
        found.update(dict.fromkeys(re.findall("`(.*?)`", names), default))
    assert found == defaults(SECTIONS[title])


def test_a_file_that_leaves_out_much_is_told_what_to_begin_with(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nchip: {memory_gib: 48, peak_tflops: {bfloat16: 362}}\n")
    with pytest.raises(ConfigError) as raised:
        load(str(path))
    assert "begin with `koushi hardware h100 > mine.yaml`" in raised.value.problems[-1].legal
