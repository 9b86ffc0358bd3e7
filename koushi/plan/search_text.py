"""What a search has found, on one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from koushi.check.rule import GLOBAL_BATCH, listed
from koushi.errors import Problem
from koushi.hardware.collective import span
from koushi.hardware.hardware import Hardware
from koushi.plan.fixes import Wider
from koushi.plan.layouts import Fixed, Layout, Question, left_out
from koushi.plan.plan import Plan
from koushi.plan.score import Scored
from koushi.plan.search import SLOWEST, SearchResult
from koushi.plan.text import argument, gib, short, would_do
from koushi.units import counted

_TOLD = 0.003
"""Share of the winner's step below which a difference is not told."""
_LEGEND = (
    "  schedule x virtual stages of a rank, - where pp is 1; micro: samples of a microbatch",
    "  reshard: whether gathered parameters are freed after forward, - where none are gathered",
)


def search_text(
    question: Question,
    on: Hardware,
    result: SearchResult,
    plans: Mapping[Layout, Plan],
    own: Plan | Problem,
    wider: Wider | None,
) -> str:
    """The ranking, the front, what is too large, and where the run file's own layout stands, or why it
    is not legal; or what would do."""
    head = f"{result.legal:,} legal layouts of {asked(question)}, {counted(result.judged, 'pipeline')} simulated"
    chosen = result.chosen
    if chosen is None:
        return "\n".join(
            [f"{head}; none fits", *_too_large(result, plans), *_LEGEND, *_not_searched(wider, on), *_barred(question)]
        )
    winner = plans[chosen.layout]
    ranked = sorted({*result.best, chosen}, key=lambda one: one.rank)
    lines = [
        f"{head}; the best tp and pp, each at its fastest",
        *_table(ranked, [_told(one, result, _lost(plans[one.layout], winner)) for one in ranked]),
        *_LEGEND,
        "",
        f"smaller or faster than every other, up to {SLOWEST - 1:.0%} slower than the fastest",
        *_table(result.front, [_told(one, result, _slower(one, chosen)) for one in result.front]),
    ]
    if result.misses:
        lines += ["", *_too_large(result, plans)]
    lines += [*_not_searched(None, on), *_barred(question)]
    if isinstance(own, Problem):
        lines += ["", f"the run file's own layout is not legal: {own.key}: {own.what}"]
    else:
        lines += ["", _own(own, winner, chosen is ranked[0])]
    return "\n".join(lines)


def asked(question: Question) -> str:
    """``64 devices``, ``64 devices with --tp 8``."""
    devices, fixed = counted(question.devices, "device"), fixed_text(question.fixed)
    return f"{devices} with {fixed}" if fixed else devices


def fixed_text(fixed: Fixed) -> str:
    """What the command line leaves no choice of, as it is written there."""
    return " ".join(argument(*one) for one in fixed.values().items())


def _told(one: Scored, result: SearchResult, told: str) -> str:
    """What is told of a row, and whether it fits tightly."""
    if one == result.chosen and one != result.best[0]:
        told = "the fastest that is not tight"
    return f"{told}, tight" if result.is_tight(one) else told


def _barred(question: Question) -> list[str]:
    """What another batch would let in."""
    found = left_out(question)
    if found is None:
        return []
    fewer = f"with {listed(found.batches)} {found.fewest or 'none'}"
    why = f"whose data-parallel ranks do not divide {GLOBAL_BATCH} {question.global_batch_size}"
    return [f"left out: {found.pairs} of {found.of} pairs of tp and pp, {why}; {fewer}"]


def _not_searched(wider: Wider | None, on: Hardware) -> list[str]:
    lines = ["", "not searched: training.compile, precision, layers per stage"]
    if wider:
        lines[:0] = ["", f"{would_do(wider, on)}: --search --gpus {wider.devices}"]
    return lines


def _too_large(result: SearchResult, plans: Mapping[Layout, Plan]) -> list[str]:
    if not result.misses:
        return []
    notes = [_lack(plans[one.layout]) for one in result.misses]
    return ["faster, but too large" if result.best else "the nearest", *_table(result.misses, notes)]


def _table(rows: Sequence[Scored], notes: Sequence[str]) -> list[str]:
    heads = ("tp", "pp", "dp_rep", "dp_shard", "schedule", "micro", "recompute", "reshard", "step", "GiB")
    cells = [heads, *(_cells(one) for one in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    left = {4, 6, 7}
    lines = []
    for row, note in zip(cells, ("", *notes), strict=True):
        shown = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(shown)}  {note}".rstrip())
    return lines


def _cells(one: Scored) -> tuple[str, ...]:
    layout = one.layout
    pipeline = layout.pipeline
    schedule = f"{pipeline.schedule} x {pipeline.stages_per_rank}" if layout.pp > 1 else "-"
    return (
        str(layout.tp),
        str(layout.pp),
        str(layout.dp_replicate),
        str(layout.dp_shard),
        schedule,
        str(layout.microbatch_size),
        layout.recompute,
        "-" if layout.dp_shard == 1 else "always" if layout.reshard_after_forward else "never",
        short(one.seconds),
        gib(one.memory),
    )


def _slower(one: Scored, best: Scored) -> str:
    return f"{one.seconds / best.seconds - 1:+.1%}" if one != best else "the fastest"


def _lost(plan: Plan, winner: Plan) -> str:
    """By what a layout is slower than the winner: the two largest parts of the difference."""
    total = winner.time.seconds
    behind = plan.time.seconds / total - 1
    if plan is winner:
        return "the fastest"
    parts = {name: (plan.time.parts[name] - winner.time.parts[name]) / total for name in winner.time.parts}
    worse = sorted((-share, name) for name, share in parts.items() if share >= _TOLD)[:2]
    told = ", ".join(f"{name} +{-share:.1%}{_crossing(plan, name)}" for share, name in worse)
    return f"{behind:+.1%}" + (f": {told}" if told else "")


def _crossing(plan: Plan, part: str) -> str:
    """Where exposed communication goes over the network."""
    mesh = plan.workload.mesh
    name = part.removeprefix("exposed ")
    if name == part or name not in mesh.names:
        return ""
    nodes = span(mesh, name, plan.hardware.inside.devices).domains
    return f" (crosses {nodes} nodes)" if nodes > 1 else ""


def _lack(plan: Plan) -> str:
    held = plan.stages(plan.fullest)
    place = f" on stage {held[0]}" if len(plan.memories) > 1 else ""
    return f"lacks {gib(-plan.room)} GiB{place}, {plan.memory.moment}"


def _own(own: Plan, winner: Plan, winner_is_fastest: bool) -> str:
    seconds, best = own.time.seconds, winner.time.seconds
    text = f"the run file's own layout: {short(seconds)}, {gib(own.memory.device)} GiB"
    if not own.fits:
        return f"{text}; {_lack(own)}"
    if seconds > best * (1 + _TOLD):
        return f"{text}; {_lost(own, winner)}"
    return f"{text}; as fast as any" + ("" if winner_is_fastest else " that is not tight")
