"""Hardware files: what ships is whole and says where its values come from; what a user gets wrong is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from koushi.errors import ConfigError
from koushi.hardware.hardware import DATA, load, names, read_file
from koushi.hardware.peaks import peak_flops
from koushi.hardware.ranges import RANGES

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
    text = text.replace("  units: 132", "  units: many").replace("  hop_us: 3.5 ", "  hops_us: 3.5 ", 1)
    text = text.replace("variation: 0.01", "variation: -1")
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    problems = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) == {"variation", "chip.units", "inside.hops_us", "inside.hop_us"}
    assert problems["chip.units"].legal == "a number of processors from 1 to 1000000 is needed"
    line = next(number for number, one in enumerate(text.splitlines(), 1) if "units: many" in one)
    assert problems["chip.units"].where.startswith(f"{path}:{line}:")
    assert problems["inside.hops_us"].legal == "did you mean hop_us?"
    assert problems["inside.hop_us"].what == "is missing"


@pytest.mark.parametrize("value", ["tpu", "1", "[cpu]", "CPU"])
def test_a_device_is_of_a_known_kind(tmp_path: Path, value: str) -> None:
    text = (DATA / "cpu.yaml").read_text(encoding="utf-8").replace("device: cpu", f"device: {value}")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.yaml:5:9: device: is .*; cpu or gpu is needed"):
        read_file(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("inside", {"devices": 1}, "inside.direct: is true, but inside.devices is 1; at least 2 are needed"),
        ("inside", {"reduces": "true"}, "inside.direct: is true, and inside.reduces too; one of the two"),
        ("network", {}, "network.direct: is true; false is needed"),
    ],
)
def test_links_without_a_switch_are_between_the_devices_of_a_node(
    tmp_path: Path, section: str, changes: dict[str, object], told: str
) -> None:
    path = tmp_path / "mine.yaml"
    before, name, after = (DATA / "h200.yaml").read_text(encoding="utf-8").partition(f"{section}:\n")
    for key, value in {"reduces": "false", **changes}.items():
        after = re.sub(rf"  {key}: .*", f"  {key}: {value}", after, count=1)
    path.write_text(f"{before}{name}  direct: true\n{after}", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"mine\.yaml:\d+:11: {re.escape(told)}"):
        read_file(path)
    path.write_text(path.read_text(encoding="utf-8").replace("direct: true", "direct: false"), encoding="utf-8")
    assert read_file(path).name == "h200"


def test_what_says_nothing_of_its_kind_is_a_gpu() -> None:
    assert {name for name in names() if load(name).device == "cpu"} == {"cpu"}
    assert load("h100").is_shipped and not load("h100").with_network(50.0).is_shipped


def test_a_users_file_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    lines = (DATA / "h200.yaml").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "mine.yaml"
    left = [line for line in lines if not line.strip().startswith(("aliases:", "large_start:"))]
    path.write_text("\n".join(left) + "\n", encoding="utf-8")
    assert len(left) == len(lines) - 3
    hardware = read_file(path)
    assert (hardware.aliases, hardware.inside.large_start, hardware.network.large_start) == ((), 1.0, 1.0)
    assert hardware.inside.gb_s == load("h200").inside.gb_s


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


def changed(path: Path, **values: object) -> Path:
    """The file of an H200 with other values, by the key's last part; peaks by ``peak_<dtype>``."""
    lines = (DATA / "h200.yaml").read_text(encoding="utf-8").splitlines()
    for key, value in values.items():
        name = key.removeprefix("peak_")
        lines = [
            f"{line[: len(line) - len(line.lstrip())]}{name}: {value}" if line.lstrip().startswith(name + ":") else line
            for line in lines
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("key", sorted(RANGES))
@pytest.mark.parametrize("value", ["-1", "1e308", ".nan", ".inf", "true", "[]", "'1'"])
def test_a_number_outside_its_range_is_refused_with_place_and_range(tmp_path: Path, key: str, value: str) -> None:
    path = changed(tmp_path / "mine.yaml", **{key: value})
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    told = [problem for problem in caught.value.problems if problem.key.rpartition(".")[2] == key]
    assert told and len(told) == len(caught.value.problems)
    assert all(problem.legal == str(RANGES[key]) for problem in told)
    assert all(problem.where.startswith(f"{path}:") and problem.where.count(":") == 2 for problem in told)


@pytest.mark.parametrize("key", sorted(key for key, legal in RANGES.items() if legal.low > 0))
@pytest.mark.parametrize("value", ["0", "1e-308"])
def test_what_is_divided_by_is_not_almost_nothing(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="is needed"):
        read_file(changed(tmp_path / "mine.yaml", **{key: value}))


def test_shares_are_at_most_one_and_peaks_are_of_known_dtypes(tmp_path: Path) -> None:
    path = changed(tmp_path / "mine.yaml", reached=1.01, sustained=2, peak_bfloat16=0)
    path.write_text(path.read_text(encoding="utf-8").replace("    float32:", "    fp32:"), encoding="utf-8")
    path.write_text(path.read_text(encoding="utf-8").replace("    float16:", "    fp16:"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert [problem.key for problem in caught.value.problems] == [
        "chip.peak_tflops.bfloat16",
        "chip.peak_tflops.fp16",
        "chip.peak_tflops.fp32",
        "chip.peak_tflops",
        "chip.sustained",
        "inside.reached",
        "network.reached",
    ]


@pytest.mark.parametrize(("text", "what"), [("", "is empty"), ("- a\n", "holds a list"), ("7\n", "holds only '7'")])
def test_a_file_of_something_else_is_told_about_hardware(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{what}; keys are needed, such as `name: my-device`"):
        load(str(path))


def test_a_folder_and_a_file_that_is_not_there_are_told_about_hardware(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").touch()
    with pytest.raises(ConfigError, match=r"is a folder; name a hardware file in it: other\.yaml"):
        load(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no such file; \.yaml files beside it: other\.yaml"):
        load(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b"])
def test_what_can_be_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no hardware is called"):
        load(name)


def test_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = (DATA / "h200.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("name: h200", "name: ''", 1), encoding="utf-8")
    with pytest.raises(ConfigError, match="name: is ''; a string that is not empty is needed"):
        load(str(path))
