"""``koushi hardware --calibrate``: what this machine does, written as a hardware file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from koushi.calibrate.measure import DTYPES, ON_CPU, ON_GPU, measure
from koushi.config.schema import JobConfig, Run
from koushi.errors import ConfigError
from koushi.hardware.calibrated import Attention, Call, Matmul, Measurements, calibrated, figures_text, yaml_text
from koushi.hardware.hardware import Hardware, load, names, read_file
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import llama_size
from koushi.output import Kind, check_target, write_text
from koushi.parallel.device_mesh import init_process_group, local_device, resolve_device
from koushi.train.launch import launch

RESULT = "measurements.json"


def _is_hardware(path: Path) -> bool:
    try:
        read_file(path)
    except ConfigError:
        return False
    return True


HARDWARE = Kind("a hardware file", "mine.yaml", _is_hardware)


def calibrate(path: Path, device: str, processes: int | None, nearest: str | None) -> tuple[Hardware, str]:
    """Measure with ``processes`` ranks, write ``path`` and return what it describes, and its main figures for people.

    Raises TrainingError for a device that is not there, ConfigError for an unknown ``nearest``, and, before it
    measures, WrongTarget for a ``path`` that cannot be written or is something else than a hardware file.
    """
    check_target(path, HARDWARE)
    kind = resolve_device(device)
    count = processes or (torch.cuda.device_count() if kind == "cuda" else min(4, os.cpu_count() or 1))
    like = load(nearest) if nearest else _nearest(kind)
    found = _measured(kind, count)
    hardware = calibrated(path.stem, found, like)
    write_text(path, yaml_text(hardware, _comments(like, count)), HARDWARE)
    return read_file(path), f"{path}: {hardware.description}\n{figures_text(found, hardware)}"


def _nearest(kind: str) -> Hardware:
    """The shipped hardware of the device's own name; h100 for a GPU that none has."""
    if kind == "cpu":
        return load("cpu")
    name = torch.cuda.get_device_name(0)
    known = [load(one) for one in names()]
    matches = [one for one in known if any(word in name for word in one.device_names)]
    return max(matches, key=lambda one: max(map(len, one.device_names))) if matches else load("h100")


def _measured(kind: str, processes: int) -> Measurements:
    with TemporaryDirectory(prefix="koushi-calibrate-") as folder:
        config = JobConfig(run=Run(device="cuda" if kind == "cuda" else "cpu"))
        size = llama_size(config.model)
        launch(_worker, Job(config, size, MeshSpec.of(dp_shard=processes), (range(1),), "calibrate", Path(folder)))
        return _read(Path(folder) / RESULT)


def _worker(job: Job) -> None:
    device = local_device(job.config.run.device)
    init_process_group(device, job.config.run.timeout)
    try:
        found = measure(device, ON_GPU if device.type == "cuda" else ON_CPU)
        if dist.get_rank() == 0:
            (job.base / RESULT).write_text(json.dumps(asdict(found)), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _read(path: Path) -> Measurements:
    found = json.loads(path.read_text(encoding="utf-8"))
    return Measurements(
        **found
        | {
            "matmuls": tuple(Matmul(**one) for one in found["matmuls"]),
            "attention": tuple(Attention(**one) for one in found["attention"]),
            "calls": tuple(Call(**one) for one in found["calls"]),
        }
    )


def _comments(like: Hardware, processes: int) -> dict[str, str]:
    other = f"not measured: that of {like.name}"
    inside = f"measured among {processes} ranks" if processes > 1 else other
    return {
        "variation": other,
        "chip": "measured",
        "chip.units": other,
        "chip.peak_tflops": other,
        **{f"chip.peak_tflops.{dtype}": "measured: the best rate" for dtype in DTYPES if like.chip.units == 1},
        "host": "measured",
        "host.step_ms": other,
        "inside": inside,
        "inside.devices": other,
        "inside.crowding": other,
        "inside.direct": other,
        "network": other,
    }
