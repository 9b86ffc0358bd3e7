from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from tiny import tiny_file, tiny_job

from koushi.cli import main
from koushi.dryrun import command
from koushi.dryrun.agreement import SLACK, disagreement_text, disagreements
from koushi.dryrun.audited import audit_job
from koushi.dryrun.command import device_kind, run_dry
from koushi.dryrun.extrapolate import whole
from koushi.dryrun.flops import block_of
from koushi.dryrun.ranks import rank_classes
from koushi.dryrun.report import rank_lines
from koushi.traffic import Collective


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["dry-run", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_file(tmp_path)
    assert run(str(path), "--dp-shard", "2", "--tp", "2", "--trace", str(tmp_path / "step.json")) == 0
    out = capsys.readouterr().out
    assert "rank 0 (dp_shard=0 tp=0), and 3 alike: 1, 2, 3" in out
    assert "at the peak, in backward" in out and "  FLOPs " in out
    assert "layers.*.attention.wq.weight (4, 16)" in out
    assert "reduce_scatter  backward   float32" in out
    assert "plan: every collective as planned, peak memory within 2%" in out
    assert "audit: each collective is on the sub-mesh that owns it" in out
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


@pytest.mark.parametrize("layers", [4, 9])
def test_modules_that_are_not_shown_are_counted(tmp_path: Path, layers: int) -> None:
    job = tiny_job(tmp_path, f"model.n_layers={layers}")
    (one,) = rank_classes(job)
    (trace,) = whole(job, "cpu", [0])
    (line,) = (line for line in rank_lines(job, one, trace) if "by module" in line)
    shown = line.split("by module")[1].strip().split(", ")
    there = {block_of(name) for name in trace.peak.modules}
    assert len(shown) == 6 and len(there) > 6
    assert shown[-1].startswith(f"{len(there) - 5} others ") and "others" not in "".join(shown[:-1])


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tiny_file(tmp_path)), "--pp", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == [] and found["disagreements"] == [] and found["device"] == "cpu"
    first, last = found["ranks"]
    assert first["alike"] == [0] and last["coordinate"]["pp"] == 1
    assert sum(first["memory"]["by_kind"].values()) == first["memory"]["peak_bytes"]
    assert sum(first["memory"]["by_module"].values()) == first["memory"]["peak_bytes"]
    sends = [one for one in first["collectives"] if one["operation"] == "send"]
    assert len(sends) == 4 and {one["peer"] for one in sends} == {1}
    assert all(one["site"].startswith("koushi/") for one in first["collectives"])
    assert sum(one["calls"] for one in first["traffic"]) == len(first["collectives"])


def test_whether_it_fits_is_told_as_plan_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_file(tmp_path))
    for overrides, fits in (("model.dim=16",), True), (("model.dim=16384", "model.n_layers=2"), False):
        with pytest.raises(SystemExit):
            main(["plan", path, "--hardware", "cpu", *overrides])
        planned = capsys.readouterr().out.splitlines()[0].partition(": ")[2]
        assert planned.startswith("fits: " if fits else "does not fit: ")
        assert run(path, *overrides) == 0, "what does not fit is told, and no failure"
        line = f"plan: on cpu, with what allocator and device take: {planned}"
        assert line in capsys.readouterr().out.splitlines()
        assert run(path, *overrides, "--json") == 0
        found = json.loads(capsys.readouterr().out)["plan"]
        assert found["fits"] == fits == (found["device_bytes"] <= found["capacity_bytes"])
        assert found["hardware"] == "cpu" and found["active_bytes"] <= found["reserved_bytes"] <= found["device_bytes"]


def test_findings_end_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "audit_job", lambda job, kind, **_: ["lonely: an all-reduce that none needs"])
    assert run(str(tiny_file(tmp_path))) == 1
    said = capsys.readouterr()
    assert "the audit has 1 finding\nlonely: an all-reduce that none needs" in said.err
    assert "audit: each" not in said.out


def test_a_timeline_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_file(tmp_path)
    text = path.read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    for target, words in (
        (tmp_path / "nowhere" / "step.json", "there is no folder"),
        (path, "is what this command reads"),
        (tmp_path / "tokenizer.json", "is not a timeline that koushi wrote"),
    ):
        assert run(str(path), "--trace", str(target)) == 2
        said = capsys.readouterr()
        assert words in said.err and said.out == "", "before anything runs"
    assert path.read_text(encoding="utf-8") == text
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == "{}"


def test_what_is_predicted_for(tmp_path: Path) -> None:
    assert device_kind(tiny_job(tmp_path, "run.device=cpu", "precision.compute=bfloat16")) == "cpu"
    assert device_kind(tiny_job(tmp_path, "run.device=cuda")) == "cuda"
    assert device_kind(tiny_job(tmp_path, "run.device=auto", "precision.compute=bfloat16")) == "cuda"
    assert device_kind(tiny_job(tmp_path, "run.device=auto")) == "cuda", "as planned, whatever this machine has"
    assert device_kind(tiny_job(tmp_path, "run.device=auto", "--hardware", "cpu")) == "cpu"


@pytest.mark.parametrize("overrides", [(), ("run.device=auto",), ("run.device=cuda",), ("--hardware", "h200")])
def test_plan_and_dry_run_take_the_same_hardware(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...]
) -> None:
    path = str(tiny_file(tmp_path))
    with pytest.raises(SystemExit):
        main(["plan", path, "--json", *overrides])
    planned = json.loads(capsys.readouterr().out)["hardware"]
    assert run(path, "--json", *overrides) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["hardware"] == planned
    assert planned == {(): "cpu", ("--hardware", "h200"): "h200"}.get(overrides, "h100-sxm-80gb")


def test_where_plan_and_run_part_both_sides_are_told(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, "--dp-shard", "2")
    (trace,) = whole(job, "cpu", [0])
    assert disagreements(job, "cpu", [trace]) == []
    gather = next(one for one in sorted(trace.traffic) if one.operation == "all_gather")
    trace.traffic[gather] -= 1
    trace.traffic[Collective("tp", "all_reduce", "forward", "float32", 64)] += 1
    object.__setattr__(trace.peak, "bytes", trace.peak.bytes + SLACK + 1)
    found = disagreements(job, "cpu", [trace])
    assert len(found) == 3 and all(text.startswith("rank 0: ") for text in found)
    assert "0 predicted, 1 ran" in "".join(found) and "peak memory planned" in found[-1]
    text = disagreement_text(found)
    assert text.startswith("plan and dry run part in 3 places") and "please report" in text.partition("\nrank 0: ")[0]


def test_where_plan_and_run_part_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "disagreements", lambda *_: ["rank 0: peak memory planned 1 B, ran 2 B"])
    path = str(tiny_file(tmp_path))
    assert run(path) == 1
    said = capsys.readouterr()
    assert "part in 1 place:" in said.err and "ran 2 B" in said.err
    assert "plan: every" not in said.out and "audit: each" in said.out
    assert run(path, "--json") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["disagreements"] == ["rank 0: peak memory planned 1 B, ran 2 B"] and said.err
    monkeypatch.setattr(command, "audit_job", lambda *_, **__: ["lonely: an all-reduce that none needs"])
    assert run(path) == 1
    said = capsys.readouterr()
    assert "the audit has 1 finding" in said.err and "part in 1 place:" in said.err


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_device_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_file(tmp_path)
    said = []
    with FULL.open("w", buffering=1 << 10) as full:
        monkeypatch.setattr("sys.stdout", full)
        monkeypatch.setattr("koushi.cli._leave", lambda stream: said.append("left"))
        code = run(str(path), "--json")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert code == 1 and said == ["left"]
    assert capsys.readouterr().err == "cannot write to standard output: No space left on device\n"


def test_every_event_is_there_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, "model.n_layers=15")
    monkeypatch.setattr("koushi.dryrun.extrapolate.MOST_WORK", 10)
    found = run_dry(job, every_event=True)
    assert len(found.traces) == 1 and not found.traces[0].extrapolated


def test_shards_that_are_padded_are_still_parameters(tmp_path: Path) -> None:
    uneven = ("model.vocab_size=34", "model.dim=20", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=26")
    job = tiny_job(tmp_path, "--dp-shard", "4", *uneven, "precision.compute=bfloat16")
    assert len(rank_classes(job)) > 1
    assert audit_job(job, "cuda") == []
