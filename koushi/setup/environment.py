"""``koushi env``: what a bug report needs, and no secrets. No torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from koushi import __version__
from koushi.report.words import columns
from koushi.units import bytes_text

PREFIXES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "MASTER_",
    "CUDA_",
    "HIP_",
    "KOUSHI_",
)
NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LD_PRELOAD",
    "PYTHONPATH",
    "LANG",
    "LC_ALL",
    "SLURM_NNODES",
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.I)
_LOGIN = re.compile(r"//[^/\s@]*@")
PATIENCE = 10
"""Seconds for a command that asks the machine."""


def environment_text(devices: list[str] | None = None) -> str:
    """Versions, machine and variables, a line each; ``devices``: what torch says of them, where it was asked."""
    rows = [
        ("koushi", __version__ + _revision()),
        ("python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"),
        ("platform", platform.platform()),
        ("cpus", _cpus()),
        ("memory", _memory()),
        ("terminal", _terminal()),
        *(("gpu", line) for line in _gpus()),
        *(("torch says", line) for line in devices or []),
    ]
    packages = [(name, version) for name, version in dependencies().items()]
    variables = [(name, value) for name, value in relevant(os.environ).items()]
    lines = columns(rows, indent="")
    lines += ["", "packages", *columns(packages)]
    lines += ["", "variables", *(columns(variables) or ["  none that matter are set"])]
    return "\n".join(lines)


def dependencies() -> dict[str, str]:
    """The version of every package that koushi names as its own, extras too; ``missing`` where there is none."""
    try:
        required = metadata.requires("koushi") or []
    except metadata.PackageNotFoundError:
        return {"koushi": "not installed as a package"}
    names = {re.split(r"[^\w.-]", one, maxsplit=1)[0]: "extra ==" in one for one in required}
    found = {}
    for name, is_extra in sorted(names.items(), key=lambda item: (item[1], item[0])):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing (an extra)" if is_extra else "missing"
    return found


def relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run behaves; what could be a secret is left out."""
    found = {}
    for name, value in sorted(variables.items()):
        if name.startswith(PREFIXES) or name in NAMES:
            found[name] = "(not shown)" if _SECRET.search(name) else _LOGIN.sub("//(not shown)@", value)
    return found


def _revision() -> str:
    """The commit, where koushi runs from a clone."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    said = _said("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*")
    return f", commit {said[0]}" if said else ""


def _cpus() -> str:
    here = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return f"{len(here)} for this process, {os.cpu_count()} in all, {platform.machine()}"


def _memory() -> str:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES") if sys.platform == "linux" else None
    return bytes_text(total) + (f", {bytes_text(free)} free" if free is not None else "")


def _terminal() -> str:
    if sys.stdout is None:
        return "standard output is closed"
    kind = "a terminal" if sys.stdout.isatty() else "not a terminal"
    return f"{kind}, {sys.stdout.encoding}"


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return ["no nvidia-smi here"]
    query = "--query-gpu=index,name,memory.total,driver_version"
    return _said("nvidia-smi", query, "--format=csv,noheader") or ["nvidia-smi finds none"]


def _said(*command: str) -> list[str]:
    """The lines that a command prints; none where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
