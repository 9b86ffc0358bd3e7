"""``koushi plan``: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commanded import SMALL, planned, run

from koushi.check.check import check
from koushi.config.load import load
from koushi.plan.allocator import runtime_bytes
from koushi.plan.plan import error_bars
from koushi.plan.text import KINDS, device_time, memory_range, short
from koushi.plan.workload import of_job
from koushi.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("llama3_*.yaml"))


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_fit_what_they_name(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(path).config.run.hardware is not None
    assert run(str(path)) == 0
    out, err = capsys.readouterr()
    assert re.match(rf"{path.stem}: fits: [\d.]+ of [\d.]+ GiB on the fullest rank", out)
    assert err == ""
    assert len(out.splitlines()) < 75
    assert max(len(line) for line in out.splitlines()) < 140


def test_there_are_examples() -> None:
    assert [path.stem for path in EXAMPLES] == ["llama3_405b", "llama3_70b", "llama3_8b"]


@pytest.mark.parametrize(
    ("name", "gpus", "samples"),
    [("llama3_8b", "64", 2048), ("llama3_70b", "512", 2048), ("llama3_405b", "8192", 1024)],
)
def test_the_examples_go_with_other_clusters(
    name: str, gpus: str, samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path, batch = str(ROOT / "examples" / f"{name}.yaml"), f"training.global_batch_size={samples}"
    assert run(path, "--gpus", gpus, "--dp-shard=-1", batch) == 0
    assert f"devices  {int(gpus):,} x h100-sxm-80gb" in capsys.readouterr().out


def test_what_does_not_fit_ends_with_3_and_says_where(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["model.name=llama3-70b", "model.n_layers=80", "data.source=synthetic"]
    assert run(small, *huge, "--pp=4", "--dp-shard=2", "training.microbatch_size=1") == 3
    out, err = capsys.readouterr()
    said = r"does not fit: ([\d.]+) of 79.1 GiB, ([\d.]+) GiB too much \(pp=(\d).*ranks .*\), .+"
    found = re.match(rf"small: {said}\n", out)
    assert found is not None
    assert (out.count("does not fit"), err) == (1, "")
    assert run(small, *huge, "--pp=4", "--dp-shard=2", "training.microbatch_size=1", "--json") == 3
    assert re.fullmatch(rf"small {said}\n", capsys.readouterr().err)
    assert float(found[1]) - 79.1 == pytest.approx(float(found[2]), abs=0.11)


def test_wrong_input_ends_with_2(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, "--gpus", "6", "--tp", "4") == 2
    assert "the degrees multiply to 16" in capsys.readouterr().err
    for search in ([], ["--search"]):
        for gpus in ("0", "six", "1048577"):
            assert run(small, "--gpus", gpus, *search) == 2
            assert f"--gpus {gpus} (parallelism.world_size): is " in capsys.readouterr().err
    assert run(small, "--hardware", "h1000") == 2
    assert "did you mean h100?" in capsys.readouterr().err
    assert run(small, "--write", "x.yaml") == 2
    assert "--search" in capsys.readouterr().err
    assert run() == 2


def test_one_device_is_not_devices(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["model.name=llama3-70b", "model.n_layers=80", "data.source=synthetic", "--dp-shard=1"]
    assert run(small, "--search", *huge) == 3
    assert "18 legal layouts of 1 device with --dp-shard 1, " in capsys.readouterr().out
    assert run(small, "--search", "--json", *huge) == 3
    assert capsys.readouterr().err == "small: no layout of 1 device with --dp-shard 1 fits h100-sxm-80gb\n"


@pytest.mark.parametrize(("name", "gpus"), [("llama3_70b", "64"), ("llama3_70b", "512")])
def test_degrees_follow_gpus(name: str, gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "examples" / f"{name}.yaml")
    batch = "training.global_batch_size=512"
    assert run(path, batch, "--gpus", gpus, "--hardware", "a100-80gb") == 0
    assert re.search(rf"{gpus} x a100.*\]; dp_shard follows --gpus\n", capsys.readouterr().out)
    assert run(path, batch, "--gpus", gpus, "--dp-shard=-1") == 0
    assert "follows" not in capsys.readouterr().out


def test_a_tight_fit_is_said_to_be_one(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = (ROOT / "koushi" / "hardware" / "data" / "h100-sxm-80gb.yaml").read_text(encoding="utf-8")
    needs = planned(Path(small)).memory.device / 2**30
    for share, said in ((0.95, "fits, tightly: "), (0.85, "fits: "), (1.02, "does not fit: ")):
        text = re.sub(r"memory_gib: .*", f"memory_gib: {needs / share}", shipped)
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        assert run(small, "--hardware", str(tmp_path / "mine.yaml")) == (0 if share < 1 else 3)
        assert capsys.readouterr().out.startswith(f"small: {said}")


def test_ranges_are_those_of_published_runs(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small) == 0
    out = capsys.readouterr().out
    found = planned(Path(small))
    low, high = memory_range(found)
    for bar in error_bars():
        said = f"half within {bar.median:.0%}, 9 in 10 within {bar.p90:.0%} as means of {bar.sources} sources, "
        assert f"published runs: {said}{bar.worst_p90:.0%} in the worst\n" in out
        assert bar.median < bar.p90 < bar.worst_p90
    off = error_bars()[1].p90
    assert found.memory.device / (1 + off) <= low < found.memory.device
    assert found.memory.device / high - 1 == pytest.approx(-off)
    earliest, latest = error_bars()[0].around(found.time.seconds)
    assert f"a step ({short(earliest)} to {short(latest)})\n" in out
    assert found.time.seconds / earliest - 1 == pytest.approx(error_bars()[0].p90)
    assert found.memory.parameters + found.memory.optimizer <= low
    assert re.search(rf"  range +{low / 2**30:.1f}  to {high / 2**30:.1f}; published runs", out)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("checkpoint.every=10", "run.grace=1e-3"), True),
        (("checkpoint.every=10",), False),
        (("checkpoint.every=0", "run.grace=1e-3"), False),
    ],
)
def test_a_step_that_sigterm_leaves_no_time_for_is_a_note(
    overrides: tuple[str, ...], told: bool, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(small, *overrides) == 0
    out, err = capsys.readouterr()
    (step,) = re.findall(r"^time +(\S+ \S+) a step", out, re.MULTILINE)
    note = (
        f"note: a step takes {step}, and SIGTERM leaves a run 0.001 s to finish its step and save (run.grace): set it "
    )
    assert err.startswith(note) if told else err == ""
    assert run(small, *overrides, "model.dim=65536", "model.n_layers=64") == 3
    assert capsys.readouterr().err == "", "what does not fit has no step to finish"


def test_nothing_is_claimed_for_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(ROOT / "examples" / "debug.yaml"), "--hardware", "cpu"]
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"^devices  \d+ x cpu, on one machine; \[", out, re.M)
    assert "no published run stands behind cpu" in out
    assert "9 in 10" not in out
    assert "  range" not in out
    assert "memory in MiB of the fullest rank" in out
    assert re.search(r"run      50 steps, .*: [\d.]+ seconds, [\d.]+ device-minutes", out)
    assert run(*arguments, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["step"]["error"], data["memory"]["error"]) == (None, None)


@pytest.mark.parametrize("text", ["device: cpu\n", "device: gpu\n", ""])
def test_a_hardware_file_says_what_kind_of_device_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    shipped = (ROOT / "koushi" / "hardware" / "data" / "cpu.yaml").read_text(encoding="utf-8")
    own = shipped.replace("name: cpu\n", "name: mine\n").replace("device: cpu\n", text)
    (tmp_path / "mine.yaml").write_text(own, encoding="utf-8")
    arguments = [str(ROOT / "examples" / "debug.yaml"), "--json"]
    found = []
    for hardware in ("cpu", str(tmp_path / "mine.yaml")):
        assert run(*arguments, "--hardware", hardware) == 0
        found.append(json.loads(capsys.readouterr().out))
    same = text == "device: cpu\n"
    assert (found[0] == found[1] | {"hardware": "cpu"}) is same
    rank = found[1]["memory"]["by_pp"][0]
    assert rank["device"] - rank["reserved"] == (
        0 if same else runtime_bytes(of_job(check(load(Path(arguments[0])))), "gpu")
    )


@pytest.mark.parametrize(("hardware", "published"), [("gb200", (True, False)), ("h200", (False, False))])
def test_an_error_bar_is_of_runs_on_such_devices(
    small: str, capsys: pytest.CaptureFixture[str], hardware: str, published: tuple[bool, bool]
) -> None:
    assert run(small, "--hardware", hardware) == 0
    out = capsys.readouterr().out
    assert ("a step (" in out, "  range " in out) == published
    assert (f"no published run stands behind {hardware}" in out) is not published[0]
    assert run(small, "--hardware", hardware, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["step"]["error"] is not None, data["memory"]["error"] is not None) == published


def test_a_file_of_ones_own_is_other_hardware_than_what_ships_under_its_name(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = (ROOT / "koushi" / "hardware" / "data" / "h100-sxm-80gb.yaml").read_text(encoding="utf-8")
    (tmp_path / "h100.yaml").write_text(shipped, encoding="utf-8")
    assert run(small, "--hardware", str(tmp_path / "h100.yaml")) == 0
    assert "published runs:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hours", "said"),
    [
        (2.4 / 3600, "2.4 device-seconds"),
        (0.5, "30.0 device-minutes"),
        (4.64, "4.64"),
        (5.41, "5.41"),
        (9.996, "10.0"),
        (14.26, "14.3"),
        (537.2, "537"),
    ],
)
def test_device_hours_have_three_figures(hours: float, said: str) -> None:
    assert device_time(hours) == (said if "device" in said else f"{said} device-hours")


def test_reserved_memory_is_accounted_for(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [small, "--dp-shard", "1", "--dp-replicate", "4", "training.global_batch_size=16"]
    assert run(*arguments) == 0
    page = capsys.readouterr().out
    assert run(*arguments, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)["memory"]["by_pp"]
    assert one["pools"] > 0
    assert re.search(rf"  streams' pools +{one['pools'] / 2**30:.3f}  of gradients and gathers", page)
    assert one["reserved"] == pytest.approx(1.05 * (one["active"] + one["pools"]), rel=1e-6)


def test_hardware_that_nobody_named_is_said_to_be_assumed(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(small)
    path.write_text(SMALL.replace("run: {hardware: h100-sxm-80gb}\n", ""), encoding="utf-8")
    assert run(small) == 0
    assert "assumed: no hardware is named (run.hardware, or --hardware), so h100-sxm-80gb" in capsys.readouterr().out
    assert run(small, "--hardware", "a100-80gb") == 0
    out = capsys.readouterr().out
    assert "assumed" not in out
    assert "4 x a100-sxm-80gb" in out


def test_hardware_of_ones_own(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = (ROOT / "koushi" / "hardware" / "data" / "h100-sxm-80gb.yaml").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(shipped.replace("name: h100-sxm-80gb", "name: mine"), encoding="utf-8")
    assert run(small, "run.hardware=mine.yaml") == 0  # relative to the run file
    assert "4 x mine" in capsys.readouterr().out


def test_the_page_and_the_json_say_the_same(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [small, "--pp", "2", "--dp-shard", "1", "--tp", "2"]
    assert run(*arguments) == 0
    page = capsys.readouterr().out
    assert run(*arguments, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    found = planned(Path(small), *arguments[1:])
    assert data["version"] == 1
    assert data["devices"] == 4
    assert data["fits"] is True
    assert data["layout"]["parallelism.tensor_parallel_degree"] == 2
    assert data["layout"]["parallelism.pipeline_parallel_layers_per_stage"] == [2, 2]
    assert data["step"]["seconds"] == found.time.seconds == pytest.approx(sum(data["step"]["parts"].values()))
    assert f"time     {short(data['step']['seconds'])} a step" in page
    for one in data["memory"]["by_pp"]:
        assert sum(one[key] for key, _ in KINDS) == one["active"] <= one["reserved"] <= one["device"]
    assert [one["ranks"] for one in data["memory"]["by_pp"]] == [[0, 1], [2, 3]]
    assert [one["name"] for one in data["submeshes"]] == ["tp", "pp"]
    tensor, pipeline = data["submeshes"]
    assert (tensor["groups"], tensor["degree"], tensor["nodes"], tensor["ranks"][1] - tensor["ranks"][0]) == (
        2,
        2,
        1,
        1,
    )
    assert pipeline["ranks"][0] in (0, 2)
    assert all(one["calls"] > 0 for use in data["submeshes"] for one in use["collectives"])


def test_exposed_communication_adds_up_to_the_waterfall(small: str) -> None:
    found = planned(Path(small), "--pp", "2", "--dp-shard", "2", "--dp-replicate", "2", "--tp", "4")
    for use in found.submeshes:
        if use.name != "pp":
            assert use.exposed == pytest.approx(found.time.parts[f"exposed {use.name}"], rel=1e-6), use.name
    assert [use.name for use in found.submeshes] == ["tp", "dp_shard", "dp_replicate", "pp"]


def test_one_device_sends_nothing(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, "--dp-shard", "1") == 0
    assert "communication: none, there is one device" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_pipeline_every_schedule_has_the_same_plan(small: str, schedule: str) -> None:
    own = planned(Path(small), f"parallelism.pipeline_parallel_schedule={schedule}")
    plain = planned(Path(small))
    assert (own.time, own.memories, own.submeshes) == (plain.time, plain.memories, plain.submeshes)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0123, "12.3 ms"), (99.96, "100 s"), (999, "999 s"), (999.6, "16.7 min"), (7199, "120 min"), (24_575, "6.83 h")],
)
def test_times_have_three_figures(seconds: float, said: str) -> None:
    assert short(seconds) == said


def test_no_torch_is_imported(small: str) -> None:
    script = (
        "import sys\nfrom koushi.cli import main\n"
        "try:\n    main(['plan', *sys.argv[1:]])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script, small], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_goes_into_a_pipe(small: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "koushi", "plan", small], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0
    assert done.stdout.startswith("small: fits")
    assert "\x1b" not in done.stdout


def test_the_json_keeps_its_names(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small, "--pp", "2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == [
        "version",
        "run",
        "hardware",
        "devices",
        "layout",
        "fits",
        "tight",
        "memory",
        "step",
        "submeshes",
        "advice",
    ]
    assert list(data["memory"]) == ["capacity", "room", "fullest", "error", "by_pp"]
    assert {"seconds", "parts", "of_pp", "tokens_per_second_per_device", "mfu", "device_hours"} <= set(data["step"])
    assert list(data["submeshes"][0]) == ["name", "groups", "degree", "ranks", "nodes", "link", "collectives"]
    collective = data["submeshes"][0]["collectives"][0]
    assert list(collective) == ["operation", "phase", "dtype", "bytes", "calls", "seconds", "exposed"]
    assert list(data["advice"]) == ["changes", "devices_that_fit", "dp_shard_that_fits", "layout_that_fits"]
    assert run(small, "--search", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    more = "global_batch_sizes_that_leave_out_fewer"
    assert list(found) == ["version", "fixed", "legal", "simulated", "chosen", "best", "front", "too_large", more]
    assert list(found["best"][0]) == ["layout", "seconds", "memory", "tight"]
