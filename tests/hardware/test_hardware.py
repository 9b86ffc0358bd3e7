"""Hardware files: what ships is whole and says where its values come from; what a user gets wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from koushi.errors import ConfigError
from koushi.hardware.hardware import DATA, load, names, read_file
from koushi.hardware.peaks import peak_flops

FILES = sorted(DATA.glob("*.yaml"))
WANTED = "v100-sxm2-32gb a100-sxm-40gb a100-sxm-80gb h100-sxm-80gb h100-pcie-80gb h100-96gb-hbm2e-500w h200 b200 gb200"


def test_the_promised_hardware_ships() -> None:
    assert {*WANTED.split(), "mi300x", "cpu"} <= set(names())
    assert len(FILES) == len(names())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_whole(path: Path) -> None:
    hardware = read_file(path)
    assert hardware.name == path.stem
    chip = hardware.chip
    assert 0 < chip.sustained <= chip.burst < 1 or chip.units == 1
    assert chip.peak("bfloat16") >= chip.peak("float32") > 0
    assert chip.memory_bytes > 2**30
    assert hardware.devices_per_node <= hardware.inside.devices
    assert hardware.network.devices == 0
    assert all(load(alias).name == hardware.name for alias in hardware.aliases)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_measured_value_names_its_source(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    section = ""
    seen = 0
    for line in text.splitlines():
        if not line.startswith(" "):
            section = line.partition(":")[0]
        key, _, value = line.partition(":")
        figure = value.partition("#")[0].strip()
        if section in ("chip", "inside", "network") and figure.replace(".", "").isdigit() and float(figure) > 0:
            seen += 1
            assert "#" in value or key.strip() == "devices", f"{path.name}: {line.strip()} names no source"
    assert seen > 10


def test_aliases_stand_for_one_hardware() -> None:
    aliases = [alias for path in FILES for alias in read_file(path).aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(names())
    assert load("h100") is load("h100-sxm-80gb")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean h200\? The names are a100-sxm-40gb, .*hardware file"):
        load("h20")


def test_what_is_wrong_with_a_users_file_is_told_at_once_with_lines(tmp_path: Path) -> None:
    text = (DATA / "h200.yaml").read_text(encoding="utf-8")
    text = text.replace("  units: 132", "  units: many").replace("  hop_us: 2 ", "  hops_us: 2 ", 1)
    text = text.replace("variation: 0.01", "variation: -1")
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    problems = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) == {"variation", "chip.units", "inside.hops_us", "inside.hop_us"}
    assert problems["chip.units"].legal == "an integer of at least 0 is needed"
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "units: many" in one)
    assert problems["chip.units"].where.startswith(f"{path}:{line}:")
    assert problems["inside.hops_us"].legal == "did you mean hop_us?"
    assert problems["inside.hop_us"].what == "is missing"


def test_another_network_leaves_the_rest() -> None:
    plain = load("a100")
    slow = plain.with_network(6.25)
    assert slow.network.bandwidth == pytest.approx(6.25e9 * plain.network.reached)
    assert slow.chip is plain.chip
    assert slow.inside is plain.inside


def test_a_running_device_finds_its_peak() -> None:
    assert peak_flops("NVIDIA A100-SXM4-40GB") == load("a100-sxm-40gb").chip.peak("bfloat16")
    assert peak_flops("NVIDIA H100 PCIe") == load("h100-pcie-80gb").chip.peak("bfloat16")
    assert peak_flops("NVIDIA GB200") == load("gb200").chip.peak("bfloat16")
    assert peak_flops("NVIDIA GeForce RTX 4090") is None
    assert peak_flops("") is None
