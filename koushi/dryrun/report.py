"""What a dry run found, for people and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from koushi.dryrun.flops import block_of
from koushi.dryrun.memory import KINDS
from koushi.dryrun.ranks import RankClass
from koushi.dryrun.trace import RankTrace
from koushi.dryrun.world import DeviceKind
from koushi.job import Job
from koushi.models.llama.flops import parameter_count
from koushi.plan.plan import Plan
from koushi.plan.text import verdict
from koushi.units import bytes_text, count_text, counted

_SHOWN_MODULES = 6
_SHOWN_RANKS = 4


def text(job: Job, kind: DeviceKind, classes: tuple[RankClass, ...], traces: list[RankTrace]) -> str:
    lines = [
        f"{job.name}: {job.model_name}, {count_text(parameter_count(job.size))} parameters, "
        f"{counted(job.mesh.world_size, 'rank')} {job.mesh} as on {kind}; {counted(len(traces), 'kind')} of ranks"
    ]
    for one, trace in zip(classes, traces, strict=True):
        lines += ["", *rank_lines(job, one, trace)]
    return "\n".join(lines)


def rank_lines(job: Job, one: RankClass, trace: RankTrace) -> Iterator[str]:
    yield f"rank {trace.rank} ({job.mesh.describe(trace.rank)}){_alike(one)}"
    if trace.extrapolated:
        yield "  read off a line through other traces: of fewer layers, or of other stages"
    peak = trace.peak
    where = _place(*peak.place)
    yield f"  memory      {bytes_text(peak.bytes)} at the peak, in {where}; {bytes_text(trace.resting)} at rest"
    for kind in KINDS:
        if peak.kinds.get(kind):
            yield f"    {kind:<22}{bytes_text(peak.kinds[kind]):>12}"
    yield "    by module   " + ", ".join(_module_texts(_by_layer(peak.modules)))
    flops = ", ".join(f"{count_text(count)} in {phase}" for phase, count in trace.flops.items())
    yield f"  FLOPs       {count_text(sum(trace.flops.values()))}: {flops}"
    yield "  parameters  " + ", ".join(f"{name} {shape}" for name, shape in _shapes(trace.shapes).items())
    yield f"  collectives {'sub-mesh':<22}{'operation':<16}{'phase':<11}{'dtype':<10}{'bytes a call':>14}{'calls':>8}"
    for collective, calls in sorted(trace.traffic.items()):
        yield (
            f"              {collective.submesh:<22}{collective.operation:<16}{collective.phase:<11}"
            f"{collective.dtype:<10}{bytes_text(collective.bytes):>14}{calls:>8}"
        )


def as_json(job: Job, kind: DeviceKind, classes: tuple[RankClass, ...], traces: list[RankTrace]) -> dict[str, Any]:
    return {
        "job": job.name,
        "mesh": dict(zip(job.mesh.names, job.mesh.shape, strict=True)),
        "device": kind,
        "ranks": [
            {
                "rank": trace.rank,
                "coordinate": job.mesh.coordinate(trace.rank),
                "alike": list(one.ranks),
                "extrapolated": trace.extrapolated,
                "parameters": trace.shapes,
                "memory": {
                    "peak_bytes": trace.peak.bytes,
                    "peak_phase": trace.peak.place[0],
                    "peak_module": trace.peak.place[1],
                    "resting_bytes": trace.resting,
                    "by_kind": dict(trace.peak.kinds),
                    "by_module": dict(trace.peak.modules),
                },
                "flops": dict(trace.flops),
                "traffic": [{**asdict(one), "calls": calls} for one, calls in sorted(trace.traffic.items())],
                "collectives": [
                    {**asdict(event.collective), "group": event.ranks, "peer": event.peer, "module": event.module,
                     "site": str(event.site)}
                    for event in trace.ledger.events
                ],
            }
            for one, trace in zip(classes, traces, strict=True)
        ],
    }  # fmt: skip


def reading(plan: Plan) -> str:
    """Whether the job fits its devices, as ``koushi plan`` reckons."""
    return f"plan: on {plan.hardware.name}, with what allocator and device take: {verdict(plan)}"


def reading_json(plan: Plan) -> dict[str, Any]:
    """``reading`` as data: bytes on the fullest rank, and of a device."""
    memory = plan.memory
    return {
        "hardware": plan.hardware.name,
        "fits": plan.fits,
        "tight": plan.tight,
        "pp": plan.fullest,
        "active_bytes": memory.active,
        "reserved_bytes": memory.reserved,
        "device_bytes": memory.device,
        "capacity_bytes": plan.hardware.chip.memory_bytes,
    }


def _alike(one: RankClass) -> str:
    others = one.ranks[1:]
    if not others:
        return ""
    shown = ", ".join(map(str, others[:_SHOWN_RANKS])) + (", ..." if len(others) > _SHOWN_RANKS else "")
    return f", and {len(others)} alike: {shown}"


def _place(phase: str, module: str) -> str:
    return f"{phase} of {module}" if module else phase


def _module_texts(modules: Counter[str]) -> Iterator[str]:
    """The largest, and what the others come to."""
    *shown, last = modules.most_common(_SHOWN_MODULES)
    for name, size in (*shown, last) if len(modules) <= _SHOWN_MODULES else shown:
        yield f"{name or 'the step'} {bytes_text(size)}"
    if len(modules) > _SHOWN_MODULES:
        left = modules.total() - sum(size for _, size in shown)
        yield f"{len(modules) - len(shown)} others {bytes_text(left)}"


def _by_layer(modules: Mapping[str, int]) -> Counter[str]:
    """Bytes by block, or by what stands beside the blocks."""
    found: Counter[str] = Counter()
    for name, size in modules.items():
        found[block_of(name)] += size
    return found


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Blocks that hold the same shapes written once."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found.setdefault(re.sub(r"layers\.\d+", "layers.*", name), set()).add(shape)
    return {name: next(iter(each)) for name, each in found.items()}
