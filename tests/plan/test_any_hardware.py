"""Whatever hardware file is accepted, a plan for it is made of finite positive numbers."""

from __future__ import annotations

import dataclasses
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koushi.check.check import check
from koushi.config.load import load
from koushi.hardware.calibrated import yaml_text
from koushi.hardware.hardware import Device, Hardware, read_file
from koushi.hardware.hardware import load as load_hardware
from koushi.hardware.ranges import ANY_OF, DTYPES, PEAK, RANGES, Range
from koushi.plan.plan import plan
from koushi.plan.workload import of_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3_8b.yaml"


def amounts(legal: Range) -> st.SearchStrategy[Any]:
    """Of a range, its ends more often than not."""
    if legal.whole:
        low, high = int(legal.low), int(legal.high)
        return st.sampled_from([low, high]) | st.integers(low, high)
    return st.sampled_from([legal.low, legal.high]) | st.floats(legal.low, legal.high)


@st.composite
def hardware(draw: st.DrawFn) -> Hardware:
    def drawn(part: Any) -> Any:
        found: dict[str, Any] = {}
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if dataclasses.is_dataclass(value):
                found[field.name] = drawn(value)
            elif field.name in RANGES:
                found[field.name] = draw(amounts(RANGES[field.name]))
            elif field.name == "peak_tflops":
                names = draw(st.sets(st.sampled_from(DTYPES))) | {draw(st.sampled_from(ANY_OF))}
                found[field.name] = {name: draw(amounts(PEAK)) for name in sorted(names)}
            elif field.name == "device":
                found[field.name] = draw(st.sampled_from(get_args(Device)))
            elif isinstance(value, bool):
                found[field.name] = draw(st.booleans())
        return dataclasses.replace(part, **found)

    made = drawn(load_hardware("h200"))
    assert isinstance(made, Hardware)
    inside = made.inside
    direct = inside.direct and inside.devices > 1 and not inside.reduces  # else the file is refused
    return dataclasses.replace(
        made, inside=dataclasses.replace(inside, direct=direct), network=dataclasses.replace(made.network, direct=False)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hardware")


@given(hardware())
@settings(max_examples=20, deadline=None)
def test_any_hardware_that_is_accepted_can_be_planned_for(folder: Path, drawn: Hardware) -> None:
    path = folder / "mine.yaml"
    path.write_text(yaml_text(drawn, {}), encoding="utf-8")
    on = read_file(path)
    found = plan(of_job(check(load(EXAMPLE))), on)
    uses = [use.seconds for use in found.submeshes]
    numbers = [found.time.seconds, *(float(one.device) for one in found.memories), *uses]
    assert all(isfinite(one) and one > 0 for one in numbers)
