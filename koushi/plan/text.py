"""A plan on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from koushi.config.overrides import SHORT
from koushi.config.write import value_text
from koushi.hardware.hardware import Hardware
from koushi.job import Job
from koushi.models.llama.flops import parameter_count
from koushi.plan.fixes import MOST_TIMES, Advice, Wider
from koushi.plan.memory import Memory
from koushi.plan.plan import ErrorBar, Plan, SubmeshUse, error_bars, is_tight
from koushi.traffic import Phase
from koushi.units import bytes_text, count_text, counted, cut_short

_BAR = 30
_SHOWN = 4
_WIDE = 60
"""Characters of a change that its figures stand beside; those of a longer one stand below."""
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


def plan_text(job: Job, plan: Plan, chosen: bool, follows: bool = False) -> str:
    """The whole plan of a run file as it stands; ``chosen``: whether anyone named the hardware; ``follows``: whether
    dp_shard is as the number of devices asks, not as the run file says."""
    parts = [_head(job, plan, chosen, follows), _time(job, plan), _memory(plan), _communication(plan)]
    return "\n\n".join("\n".join(part) for part in parts)


def verdict(plan: Plan) -> str:
    """Whether the plan fits, by how much and where."""
    memory, total = plan.memory, plan.hardware.chip.memory_bytes
    place = _place(plan, plan.fullest)
    if plan.fits:
        how = "fits, tightly" if plan.tight else "fits"
        return f"{how}: {_of(memory.device, total)} on the fullest rank{place}"
    lacks = f"{_of(memory.device, total)}, {gib(-plan.room)} GiB too much"
    return f"does not fit: {lacks}{place}, {memory.moment}"


def late_saves(job: Job, plan: Plan) -> list[str]:
    """A note where SIGTERM would end a run before it has finished its step and saved; none of a run that cannot be."""
    config, seconds = job.config, plan.time.seconds
    if not plan.fits or not config.checkpoint.every or seconds <= config.run.grace:
        return []
    return [
        f"a step takes {short(seconds)}, and SIGTERM leaves a run {config.run.grace:g} s to finish its step and save "
        "(run.grace): set it above the time of a step and a save"
    ]


def _of(size: float, total: float) -> str:
    """``33.8 of 79.1 GiB``, ``44.1 MiB of 16.0 GiB``."""
    return f"{gib(size)} of {gib(total)} GiB" if size >= 2**30 else f"{bytes_text(size)} of {gib(total)} GiB"


def _head(job: Job, plan: Plan, chosen: bool, follows: bool) -> list[str]:
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
        f"devices  {plan.devices:,} x {hardware.name}, {_nodes(plan)}; {degrees}"
        f"{'; dp_shard follows --gpus' if follows else ''}",
        f"batch    {workload.global_batch_size} samples of {workload.seq_len:,} tokens, "
        f"{counted(workload.microbatches, 'microbatch')} of {workload.microbatch_size} a rank; "
        f"{pipeline}recompute {workload.recompute}{reshard}",
    ]
    if not chosen:
        lines.insert(3, f"         assumed: no hardware is named (run.hardware, or --hardware), so {hardware.name}")
    return lines


def _nodes(plan: Plan) -> str:
    """``8 per node``; that a machine has room for very many ranks on its CPU tells nothing."""
    hardware = plan.hardware
    if hardware.device == "cpu" and plan.devices <= hardware.devices_per_node:
        return "on one machine"
    return f"{hardware.devices_per_node} per node"


def _time(job: Job, plan: Plan) -> list[str]:
    time = plan.time
    seconds = time.seconds
    steps = job.config.training.steps
    device_hours = seconds * steps * plan.devices / 3600
    tokens = count_text(plan.workload.tokens * steps)
    lines = [
        f"time     {short(seconds)} a step{_seconds_range(plan)}",
        f"         {_trust(plan, error_bars()[0])}",
        f"speed    {count_text(time.tokens_per_second_per_device * plan.devices)} tokens/s, "
        f"{count_text(time.tokens_per_second_per_device)} per device; MFU {_percent(time.mfu)}",
        "         MFU as PaLM counts: 6 FLOPs per parameter but the input embedding's, attention in full, no recompute",
        f"run      {steps:,} steps, {tokens} tokens: {_lasting(seconds * steps)}, "
        f"{device_time(device_hours)}, without stops",
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
    rows = [(name, getattr(memory, key)) for key, name in KINDS]
    largest = max(1, *(size for _, size in rows))
    unit, scale = ("GiB", 2**30) if memory.device >= 2**30 else ("MiB", 2**20)
    lines = [f"memory in {unit} of the fullest rank{_place(plan, plan.fullest)}, {memory.moment}"]
    for name, size in rows:
        if size >= 2**20 or size == largest:
            lines.append(_size_line(name, size / scale, f"{'#' * round(_BAR * size / largest)}"))
    device = "with the driver and communicators: what nvidia-smi shows"
    if plan.hardware.device == "cpu":
        device = "of tensors alone: Python and torch take some more"
    lines += [
        _size_line("active", memory.active / scale, "= the above, tensors in use"),
        *_pools(memory, scale),
        _size_line("reserved", memory.reserved / scale, "with what the allocator cannot hand out"),
        _size_line("device", memory.device / scale, device),
    ]
    bar = error_bars()[1]
    if bar.stands_behind(plan.hardware):
        low, high = memory_range(plan)
        lines.append(_size_line("range", low / scale, f"to {_figure(high / scale)}; {_trust(plan, bar)}"))
    if len(plan.memories) > 1:
        lines.append(f"  by stage rank            {_by_coordinate(plan.memories, scale)} {unit}")
    return lines


def _pools(memory: Memory, scale: float) -> list[str]:
    """What makes reserved memory far more than the tensors of one moment; nothing where it is little."""
    if memory.pools < 0.01 * memory.active:
        return []
    note = "of gradients and gathers, full at other moments; they serve nothing else"
    return [_size_line("streams' pools", memory.pools / scale, note)]


def memory_range(plan: Plan) -> tuple[float, float]:
    """What would be measured at the error bar's p90; never less than what stays throughout, which is known."""
    memory = plan.memory
    low, high = error_bars()[1].around(memory.device)
    return min(max(low, memory.parameters + memory.optimizer + memory.runtime), memory.device), high


def _seconds_range(plan: Plan) -> str:
    bar = error_bars()[0]
    low, high = bar.around(plan.time.seconds)
    return f" ({short(low)} to {short(high)})" if bar.stands_behind(plan.hardware) else ""


def _trust(plan: Plan, bar: ErrorBar) -> str:
    """How far plans of published runs were from what those measured."""
    if not bar.stands_behind(plan.hardware):
        return f"no published run stands behind {plan.hardware.name}"
    return (
        f"published runs: half within {bar.median:.0%}, 9 in 10 within {bar.p90:.0%} as means of "
        f"{bar.sources} sources, {bar.worst_p90:.0%} in the worst"
    )


def _by_coordinate(memories: Sequence[Memory], scale: float) -> str:
    sizes = [_figure(one.device / scale) for one in memories]
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
        lines.append(f"  {use.name:<14}{groups}, {nodes} by {use.link}; ranks {cut_short(use.ranks, _SHOWN)}")
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
        devices = counted(before.devices, "device")
        if advice.wider is None:
            return f"no layout of {devices} fits, nor of up to {MOST_TIMES} times as many"
        flags = " ".join([f"--gpus {advice.wider.devices}", *(argument(*one) for one in advice.values.items())])
        return f"no layout of {devices} fits; {would_do(advice.wider, before.hardware)}: {flags}"
    head = "what would make it faster" if before.fits else "what would make it fit"
    written = [" ".join(argument(*one) for one in fix.values.items()) for fix in advice.fixes]
    width = max([len(text) for text in written if len(text) <= _WIDE], default=_WIDE)
    lines = [head]
    for fix, text in zip(advice.fixes, written, strict=True):
        note = f"  ({fix.note})" if fix.note else ""
        gain = f"{fix.seconds / before.time.seconds - 1:>+6.1%}"
        tight = "  tight" if is_tight(fix.memory, before.hardware) else ""
        if len(text) > width:  # in a line of its own, so that the columns stay
            lines.append(f"  {text}")
            text = ""
        lines.append(f"  {text:<{width}}  {short(fix.seconds):>8}  {gain}  {_size(fix.memory):>8}{tight}{note}")
    lines.append(f"--search weighs every layout of {before.devices:,} {'device' if before.devices == 1 else 'devices'}")
    return "\n".join(lines)


def would_do(wider: Wider, hardware: Hardware) -> str:
    """``16 would do, tightly (76.2 of 79.1 GiB)``."""
    tightly = ", tightly" if is_tight(wider.memory, hardware) else ""
    return f"{wider.devices:,} would do{tightly} ({_of(wider.memory, hardware.chip.memory_bytes)})"


_FLAGS = {short.key: flag for flag, short in SHORT.items()}


def argument(key: str, value: object) -> str:
    text = value_text(value)
    return f"{_FLAGS[key]} {text}" if key in _FLAGS else f"{key}={text}"


def _size_line(name: str, figure: float, note: str) -> str:
    return f"  {name:<24} {_figure(figure):>8}  {note}".rstrip()


def _figure(value: float) -> str:
    return f"{value:.1f}" if value >= 0.05 or value == 0 else f"{value:.3f}"


def _size(size: float) -> str:
    return f"{gib(size)} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _place(plan: Plan, pp: int, ranks: bool = True) -> str:
    """`` (pp=3, ranks 24-31)``; nothing where all ranks are alike."""
    if len(plan.memories) == 1:
        return ""
    first, last = plan.ranks(pp)
    stages = plan.stages(pp)
    held = f"stage {stages[0]}" if len(stages) == 1 else f"stages {cut_short(stages, _SHOWN)}"
    return f" (pp={pp}: {held}; ranks {first}-{last})" if ranks else f" (pp={pp})"


def gib(size: float) -> str:
    return f"{size / 2**30:.1f}" if size >= 0.05 * 2**30 else f"{size / 2**30:.3f}"


def short(seconds: float) -> str:
    """Three figures: ``8.57 s``, ``12.3 ms``; from 1,000 s on in minutes, from two hours on in hours."""
    units = [("h", 1 / 3600)] if seconds >= 7200 else [("min", 1 / 60)] if seconds >= 999.5 else []
    for unit, scale in (*units, ("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "us":
            digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable: the last unit always returns")


def _lasting(seconds: float) -> str:
    for unit, scale in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def device_time(hours: float) -> str:
    """Three figures: ``4.64 device-hours``, ``33.24M device-hours``; below an hour in the units of ``_lasting``."""
    if hours * 60 < 1:
        return f"{hours * 3600:.1f} device-seconds"
    if hours < 1:
        return f"{hours * 60:.1f} device-minutes"
    digits = 2 if hours < 9.995 else 1
    return f"{hours:.{digits}f} device-hours" if hours < 99.95 else f"{count_text(hours)} device-hours"


def _percent(share: float) -> str:
    """Two figures, and a decimal above 10%."""
    return f"{share:.1%}" if share >= 0.0995 or share == 0 else f"{share * 100:.2g}%"
