"""A plan on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from koushi.config.overrides import SHORT
from koushi.job import Job
from koushi.models.llama.flops import parameter_count
from koushi.plan.fixes import Advice
from koushi.plan.memory import Memory
from koushi.plan.plan import ErrorBar, Plan, SubmeshUse, error_bars
from koushi.traffic import Phase
from koushi.units import bytes_text, count_text, counted

_BAR = 30
_SHOWN = 4
KINDS: tuple[tuple[str, str], ...] = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer state"),
    ("unsharded_parameters", "unsharded parameters"),
    ("unsharded_gradients", "unsharded gradients"),
    ("activations", "activations"),
    ("logits", "logits and loss"),
    ("pipeline_buffers", "pipeline buffers"),
    ("communication_buffers", "communication buffers"),
)
"""Fields of Memory, and what a reader calls them."""


def plan_text(job: Job, plan: Plan, chosen: bool) -> str:
    """The whole plan of a run file as it stands; ``chosen``: whether anyone named the hardware."""
    parts = [_head(job, plan, chosen), _time(job, plan), _memory(plan), _communication(plan)]
    return "\n\n".join("\n".join(part) for part in parts)


def verdict(plan: Plan) -> str:
    """Whether the plan fits, by how much and where."""
    memory, total = plan.memory, plan.hardware.chip.memory_bytes
    place = _place(plan, plan.fullest)
    if plan.fits:
        return f"fits: {gib(memory.device)} of {gib(total)} GiB on the fullest rank{place}"
    lacks = f"{gib(memory.device)} of {gib(total)} GiB, {gib(-plan.room)} GiB too much"
    return f"does not fit: {lacks}{place}, {memory.moment}"


def _head(job: Job, plan: Plan, chosen: bool) -> list[str]:
    workload, hardware = plan.workload, plan.hardware
    degrees = workload.mesh
    pipeline = ""
    if degrees.degree("pp") > 1:
        pipeline = f"{workload.schedule}, {counted(workload.stages_per_rank, 'stage')} per rank; "
    reshard = ""
    if degrees.degree("pp") == 1 and degrees.degree("dp_shard") > 1:
        reshard = f", reshard_after_forward {'always' if workload.reshard_after_forward else 'never'}"
    lines = [
        f"{job.name}: {verdict(plan)}",
        f"model    {job.model_name}, {count_text(parameter_count(job.size))} parameters, "
        f"{workload.parameters} masters, {workload.compute} compute, {workload.reduce} gradient sums",
        f"devices  {plan.devices:,} x {hardware.name}, {hardware.devices_per_node} per node; {degrees}",
        f"batch    {workload.global_batch_size} samples of {workload.seq_len:,} tokens, "
        f"{counted(workload.microbatches, 'microbatch')} of {workload.microbatch_size} a rank; "
        f"{pipeline}recompute {workload.recompute}{reshard}",
    ]
    if not chosen:
        lines.insert(3, f"         assumed: no hardware is named (run.hardware, or --hardware), so {hardware.name}")
    return lines


def _time(job: Job, plan: Plan) -> list[str]:
    time, bar = plan.time, error_bars()[0]
    seconds = time.seconds
    steps = job.config.training.steps
    days = seconds * steps / 86_400
    tokens = count_text(plan.workload.tokens * steps)
    lines = [
        f"time     {short(seconds)} a step ({short(seconds * (1 - bar.p90))} to {short(seconds * (1 + bar.p90))}; "
        f"{_came_within(bar)})",
        f"speed    {count_text(time.tokens_per_second_per_device * plan.devices)} tokens/s, "
        f"{count_text(time.tokens_per_second_per_device)} per device; MFU {time.mfu:.1%} "
        f"(PaLM's count: 6 FLOPs per parameter and token, attention in full, no recompute)",
        f"run      {steps:,} steps, {tokens} tokens: {_days(days)}, "
        f"{count_text(days * 24 * plan.devices)} device-hours, without stops",
        "",
        f"where the {short(seconds)} of a step go, on the ranks that work longest{_place(plan, time.pp)}",
    ]
    for name, part in time.parts.items():
        if part >= 0.0005 * seconds:
            bars = "#" * round(_BAR * part / seconds)
            lines.append(f"  {name:<24} {short(part):>8}  {part / seconds:>4.0%}  {bars}".rstrip())
    return lines


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    lines = [f"memory of the fullest rank{_place(plan, plan.fullest)}, {memory.moment}"]
    rows = [(name, getattr(memory, key)) for key, name in KINDS]
    largest = max(1, *(size for _, size in rows))
    for name, size in rows:
        if size >= 2**20 or size == largest:
            lines.append(_size_line(name, size, f"{'#' * round(_BAR * size / largest)}"))
    lines += [
        _size_line("active", memory.active, "= the above, tensors in use"),
        _size_line("reserved", memory.reserved, "with what the allocator cannot hand out"),
        _size_line("device", memory.device, "with the driver and communicators: what nvidia-smi shows"),
        f"  {_came_within(error_bars()[1])}",
    ]
    if len(plan.memories) > 1:
        lines.append(f"  by stage rank            {_by_coordinate(plan.memories)} GiB")
    return lines


def _came_within(bar: ErrorBar) -> str:
    return f"9 in 10 published runs came within {bar.p90:.0%} of their plan, as a mean of their sources"


def _by_coordinate(memories: Sequence[Memory]) -> str:
    sizes = [gib(one.device) for one in memories]
    if len(sizes) <= 16:
        return " ".join(sizes)
    return " ".join(sizes[:8]) + " ... " + " ".join(sizes[-4:])


def _communication(plan: Plan) -> list[str]:
    rank = plan.ranks(plan.time.pp)[0]
    lines = [
        f"communication of a step on rank {rank}{_place(plan, plan.time.pp, ranks=False)}",
        f"  {'sub-mesh':<14}{'collective':<26}{'calls':>8}{'bytes':>12}{'time':>10}{'exposed':>10}",
    ]
    for use in plan.submeshes:
        nodes = "inside a node" if use.nodes == 1 else f"over {use.nodes} nodes"
        groups = f"{use.groups:,} {'group' if use.groups == 1 else 'groups'} of {use.degree}"
        lines.append(f"  {use.name:<14}{groups}, {nodes} by {use.link}; ranks {_ranks(use.ranks)}")
        lines += [_row(row) for row in rows_of(use)]
    if not plan.submeshes:
        lines = ["communication: none, there is one device"]
    return lines


@dataclass(frozen=True)
class Row:
    """Calls that are alike but for size and dtype."""

    operation: str
    phase: Phase
    calls: int
    bytes: int
    seconds: float
    exposed: float


def rows_of(use: SubmeshUse) -> list[Row]:
    found: dict[tuple[str, Phase], Row] = {}
    for one in use.calls:
        kind = one.collective
        key = (kind.operation, kind.phase)
        before = found.get(key, Row(*key, 0, 0, 0.0, 0.0))
        found[key] = Row(
            *key,
            before.calls + one.calls,
            before.bytes + one.calls * kind.bytes,
            before.seconds + one.calls * one.seconds,
            before.exposed + one.exposed,
        )
    phases: tuple[Phase, ...] = ("start", "forward", "backward", "optimizer")
    return sorted(found.values(), key=lambda row: (phases.index(row.phase), row.operation))


def _row(row: Row) -> str:
    name = f"{row.phase} {row.operation}"
    figures = f"{row.calls:>8,}{bytes_text(row.bytes):>12}{short(row.seconds):>10}{short(row.exposed):>10}"
    return f"  {'':<14}{name:<26}{figures}"


def advice_text(before: Plan, advice: Advice) -> str:
    """The changes that would help, each as it is written behind the command; empty where there are none."""
    if not advice.fixes:
        if before.fits:
            return ""
        if advice.devices is None:
            return "no layout of as many devices fits, nor a few times as many"
        flags = f"--gpus {advice.devices} --dp-shard {advice.dp_shard}"
        return f"no layout of as many devices fits; {advice.devices:,} would do: {flags}"
    head = "what would make it faster" if before.fits else "what would make it fit"
    written = [" ".join(_argument(*one) for one in fix.values.items()) for fix in advice.fixes]
    width = min(60, max(len(text) for text in written))
    lines = [head]
    for fix, text in zip(advice.fixes, written, strict=True):
        note = f"  ({fix.note})" if fix.note else ""
        gain = f"{fix.seconds / before.time.seconds - 1:>+6.1%}"
        lines.append(f"  {text:<{width}}  {short(fix.seconds):>8}  {gain}  {gib(fix.memory):>6} GiB{note}")
    return "\n".join(lines)


_FLAGS = {key: flag for flag, key in SHORT.items()}


def _argument(key: str, value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{_FLAGS[key]} {text}" if key in _FLAGS else f"{key}={text}"


def _size_line(name: str, size: float, note: str) -> str:
    return f"  {name:<24} {gib(size):>8}  {note}".rstrip()


def _place(plan: Plan, pp: int, ranks: bool = True) -> str:
    """`` (pp=3, ranks 24-31)``; nothing where all ranks are alike."""
    if len(plan.memories) == 1:
        return ""
    first, last = plan.ranks(pp)
    stages = plan.stages(pp)
    held = f"stage {stages[0]}" if len(stages) == 1 else f"stages {_ranks(stages)}"
    return f" (pp={pp}: {held}; ranks {first}-{last})" if ranks else f" (pp={pp})"


def _ranks(ranks: Sequence[int]) -> str:
    shown = " ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"{shown} ... {ranks[-1]}" if len(ranks) > _SHOWN else shown


def gib(size: float) -> str:
    return f"{size / 2**30:.1f}" if size >= 0.05 * 2**30 else f"{size / 2**30:.3f}"


def short(seconds: float) -> str:
    """Three figures: ``8.57 s``, ``12.3 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "us":
            digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable: the last unit always returns")


def _days(days: float) -> str:
    return f"{days:.1f} days" if days >= 1 else f"{days * 24:.1f} hours"
