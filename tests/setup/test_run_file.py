"""A first run file: legal as it is, commented with the schema's words, and never written over another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.check.explain import sources
from koushi.config.describe import keys
from koushi.config.load import load
from koushi.errors import ConfigError, WrongTarget
from koushi.hardware.hardware import DATA
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import PRESETS, LlamaSize
from koushi.plan.command import hardware_of
from koushi.plan.layouts import layout_of, question_of
from koushi.plan.plan import plan
from koushi.plan.search import search
from koushi.plan.text import short, verdict
from koushi.plan.workload import of_job
from koushi.setup import run_file
from koushi.setup.degrees import rule_of_thumb
from koushi.setup.first_layout import WORTH
from koushi.setup.launch_script import launch
from koushi.setup.run_file import WIDEST, init
from koushi.units import counted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("devices", [None, 1, 3, 5, 6, 8, 96, 131, 4096, 16_384])
@pytest.mark.parametrize("model", PRESETS)
def test_it_is_legal_for_every_preset(model: str, devices: int | None, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    said, fits = init(path, model, devices)
    job = check(load(path))
    assert job.model_name == model
    assert job.mesh.world_size == (devices or job.mesh.world_size)
    assert said.startswith(f"wrote {path}: {model}, ")
    assert str(job.mesh) in said
    assert f"koushi plan {path}" in said.partition("next: ")[2]
    found = plan(of_job(job), hardware_of(job))
    takes = f"; a step takes {short(found.time.seconds)}" if found.fits else ""
    assert f"\non h100-sxm-80gb, which is assumed where --hardware names none, it {verdict(found)}{takes}\n" in said
    assert fits is found.fits and ("koushi train" in said or "koushi launch" in said) is fits
    if not fits:
        assert f"\nno layout of {counted(job.mesh.world_size, 'device')} fits" in said
    if model != "llama3-debug":
        assert job.config.precision.compute == "bfloat16"
        assert job.config.checkpoint.every > 0


def test_what_the_rule_of_thumb_makes_too_large_is_written_as_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    said, fits = init(path, "llama3-8b", 2)
    job = check(load(path))
    assert fits and plan(of_job(job), hardware_of(job)).fits and job.mesh.world_size == 2
    assert "\nso that it fits, it has --tp 2 training.recompute=full\n" in said
    assert "koushi train" in said and check(load(path, ["--tp", "1"])).mesh.degree("dp_shard") == 2
    assert all("#" in line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("  "))


@pytest.mark.parametrize(
    ("model", "devices", "hardware"),
    [
        ("llama3-8b", 8, None),
        ("llama3-70b", 16, None),
        ("llama3-70b", 64, None),
        ("llama3-70b", 64, "h200"),
        ("llama3-70b", 64, "gb200"),
        ("llama3-405b", 1024, None),
        ("llama3-8b", 8, "a100-sxm-40gb"),
        ("llama3-1b", 8, "v100-sxm2-32gb"),
    ],
)
def test_no_search_finds_what_is_clearly_faster(model: str, devices: int, hardware: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    said, fits = init(path, model, devices, hardware)
    job = check(load(path))
    written = plan(of_job(job), hardware_of(job))
    result = search(question_of(job), written.workload, written.hardware)
    best = result.chosen
    assert fits and best is not None
    assert written.time.seconds * (1 - WORTH) <= best.seconds
    assert not written.tight or result.is_tight(best)
    init(tmp_path / "simple.yaml", model, devices, hardware, choose=rule_of_thumb)
    simple = of_job(check(load(tmp_path / "simple.yaml")))
    text = path.read_text(encoding="utf-8")
    if "--search found" in text:
        assert layout_of(written.workload) == best.layout
        assert (
            f"\nof {result.legal:,} layouts it has the fastest" in said and "; by rule of thumb it would be [" in said
        )
        assert f"plan --search found for {job.hardware};" in text
    else:
        assert written.workload == simple and " layouts it has" not in said
    assert_is_simple(text)


def assert_is_simple(text: str) -> None:
    """Every key has a comment, at most one space from its value where that is long, and none is there for a default."""
    section, meanings = "", {key.name: key for key in keys()}
    for line in text.splitlines():
        if line.startswith("  ") and not line.lstrip().startswith("#"):
            found = re.fullmatch(r"  (\w+): (\S+) +# \S.*", line)
            assert found and len(line) <= WIDEST, line
            key = meanings[f"{section}.{found[1]}"]
            if found[1] in ("pipeline_parallel_stages_per_rank", "reshard_after_forward"):
                assert found[2] not in ("auto", "null", "always", "1") and key.default != found[2], line
        elif line[:1].isalpha():
            section = line.removesuffix(":")


def test_degrees_that_were_asked_for_stay_though_a_search_finds_faster_ones(tmp_path: Path) -> None:
    said, fits = init(tmp_path / "run.yaml", "llama3-70b", 64, choose=rule_of_thumb)
    assert fits and "on 64 devices [pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=8]\n" in said and "fastest" not in said


@pytest.mark.parametrize(
    ("model", "devices", "hardware"),
    [("llama3-1b", 1, None), ("llama3-debug", 4, None), ("llama3-1b", 8, "cpu")],
)
def test_nothing_is_searched_on_one_device_on_cpus_and_for_a_laptop(
    model: str, devices: int, hardware: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("koushi.setup.first_layout.search", never)
    said, _ = init(tmp_path / "run.yaml", model, devices, hardware)
    assert f"\non {hardware or 'h100-sxm-80gb'}" in said and "fits" in said


@pytest.mark.parametrize(("hardware", "node"), [("gb200", 4), ("h200", 8), ("own.yaml", 4)])
def test_the_script_is_for_nodes_of_the_hardware(hardware: str, node: int, tmp_path: Path) -> None:
    shipped = (DATA / "h100-pcie-80gb.yaml").read_text(encoding="utf-8")
    own = shipped.replace("\ndevices_per_node: 8", "\ndevices_per_node: 4").replace("  devices: 8", "  devices: 4")
    (tmp_path / "own.yaml").write_text(own.replace("name: h100", "name: own"), encoding="utf-8")
    name = str(tmp_path / hardware) if hardware.endswith(".yaml") else hardware
    path = tmp_path / "run.yaml"
    said, fits = init(path, "llama3-8b", 16, name)
    command = f"koushi launch {path} --nodes {16 // node} --backend slurm"
    assert fits and said.endswith(f", {command}") and f"#   {command} " in path.read_text(encoding="utf-8")
    assert launch(path, [], 16 // node).job.mesh == check(load(path)).mesh


def test_hardware_of_ones_own_choice(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    said, fits = init(path, "llama3-8b", 2, "b200")
    assert fits and check(load(path)).config.run.hardware == "b200" and "assumed" not in said
    with pytest.raises(ConfigError, match="no hardware is called 'nah'"):
        init(tmp_path / "other.yaml", "llama3-8b", 2, "nah")
    assert not (tmp_path / "other.yaml").exists()
    small, _ = init(tmp_path / "small.yaml", "llama3-8b", None, "a100-sxm-40gb")
    large, _ = init(tmp_path / "large.yaml", "llama3-8b", None, "h100-sxm-80gb")
    assert "on 16 devices" in small and "on 8 devices" in large


def test_comments_are_the_schemas_words(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    init(path, "llama3-8b", 8)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert max(len(line) for line in lines if str(path) not in line and "koushi config" not in line) <= WIDEST
    shown = " ".join(line.partition("# ")[2] for line in lines)
    meanings = {key.name: key.meaning for key in keys()}
    for name in ("training.recompute", "run.resume", "data.path", "checkpoint", "parallelism.tensor_parallel_degree"):
        assert meanings[name] in shown
    assert "One of GPipe, 1F1B, Interleaved1F1B, LoopedBFS" in shown
    for key in keys():
        if key.is_section and key.name != "model.rope_scaling":
            assert f"{key.name}:" in lines


def test_every_key_in_a_comment_is_one_that_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    init(path, "llama3-debug", 1)
    text = path.read_text(encoding="utf-8")
    commented = re.findall(r"^  # (\w+): \S+ ", text, re.M)
    assert commented == ["hf", "pipeline_parallel_schedule", "path", "tokenizer", "folder", "hardware"]
    path.write_text(re.sub(r"^  # (\w+: \S+ )", r"  \1", text, flags=re.M), encoding="utf-8")
    assert load(path).found == ()


def test_what_is_written_is_set_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    init(path, "llama3-405b", 1024)
    run_file = load(path)
    found = sources(run_file, check(run_file))
    for name in ("training.steps", "parallelism.pipeline_parallel_schedule", "optimizer.lr", "checkpoint.keep_last"):
        assert found[name].startswith(f"{path}:"), name
    assert "koushi launch" in path.read_text(encoding="utf-8")


def test_degrees_can_come_from_elsewhere(tmp_path: Path) -> None:
    def choose(size: LlamaSize, devices: int) -> MeshSpec:
        return MeshSpec.of(pp=2, dp_shard=devices // 2)

    path = tmp_path / "run.yaml"
    init(path, "llama3-1b", 6, choose=choose)
    job = check(load(path))
    assert str(job.mesh) == "[pp=2, dp_replicate=1, dp_shard=3, cp=1, tp=1]"
    assert job.microbatches >= 8


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already; name a new file, or remove it"):
        init(path, "llama3-debug", None)
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is there already"):
        init(path, "llama3-debug", None)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(ConfigError, match="is there already"):
        init(tmp_path, "llama3-debug", None)


@pytest.mark.parametrize(
    ("name", "what"),
    [("none/run.yaml", "there is no folder"), ("file/run.yaml", "is not a folder"),
     ("a\0b", "embedded null"), ("x" * 300, "File name too long")],
)  # fmt: skip
def test_places_where_no_file_can_be(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WrongTarget, match=what):
        init(tmp_path / name, "llama3-debug", None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WrongTarget, match="is read-only"):
        init(tmp_path / "run.yaml", "llama3-debug", None)


def test_an_unknown_model_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        init(tmp_path / "run.yaml", "llama-70b", None)
    assert str(raised.value).startswith(
        "command line (--model llama-70b): there is no such model; did you mean llama3-70b? The models are "
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a run.yaml", "a'b.yaml", "$x.yaml", "#.yaml", "日本.yaml", "a\nb.yaml"])
def test_odd_names_stay_in_comments(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    init(path, "llama3-debug", 2)
    assert check(load(path)).mesh.world_size == 2


@pytest.mark.long
def test_the_smallest_trains_as_it_is(tmp_path: Path) -> None:
    for arguments in (["init", "run.yaml"], ["train", "run.yaml", "training.steps=2", "training.seq_len=32"]):
        done = subprocess.run(
            [sys.executable, "-m", "koushi", *arguments],
            cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step-00000002").is_dir()


def test_ctrl_c_in_the_search_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_file, "choose_layout", interrupted)
    with pytest.raises(KeyboardInterrupt):
        init(tmp_path / "run.yaml", "llama3-8b", 8)
    assert list(tmp_path.iterdir()) == []
