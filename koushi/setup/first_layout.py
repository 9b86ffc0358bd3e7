"""The layout of a first run file: a simple one, or another where that fits or is clearly faster. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from koushi.check.check import check
from koushi.check.rule import DP_SHARD
from koushi.config.load import load
from koushi.config.write import value_text
from koushi.job import Job
from koushi.plan.fixes import Advice, advice
from koushi.plan.layouts import Layout, layout_of, question_of
from koushi.plan.plan import Plan, is_tight
from koushi.plan.score import Scored
from koushi.plan.search import search
from koushi.plan.text import argument, short
from koushi.plan.workload import of_job

WORTH = 0.05
"""Share of a step that the layout of a search has to save: it has more settings than a simple one."""


@dataclass(frozen=True)
class Choice:
    """What a first run file should have."""

    layout: Layout | None = None
    """Another than it has; None: it stays as it is."""
    why: str = ""
    """A line for people where there is another."""
    searched: bool = False
    """Whether a search has found it."""
    helps: Advice | None = None
    """Where it stays although it does not fit."""


def choose_layout(path: Path, job: Job, simple: Plan, may_search: bool) -> Choice:
    """The layout for the run file at ``path``, whose job and plan ``job`` and ``simple`` are.

    The simple one stays, with a change or two where it does not fit, unless a search finds one that is faster by
    ``WORTH``, or leaves room where the simple one has little. On a single device and on CPUs nothing is searched.
    """
    before, on = layout_of(simple.workload), simple.hardware
    plain, why, helps = Scored(before, simple.time.seconds, simple.memory.device), "", None
    fits = simple.fits
    if not fits:
        helps = advice(question_of(job), simple)
        fix = next((one for one in helps.fixes if not one.note), None)  # what changes more than the layout has a note
        if fix is not None:
            fits, plain = True, Scored(_layout_under(path, fix.values), fix.seconds, fix.memory)
            follows = load(path).config.parallelism.data_parallel_shard_degree == -1
            said = [argument(*one) for one in fix.values.items() if one[0] != DP_SHARD or not follows]
            why = f"so that it fits, it has {' '.join(said)}"
    if may_search and simple.devices > 1 and on.device == "gpu":
        result = search(question_of(job), simple.workload, on)
        best = result.chosen
        if best is not None and not (fits and _is_good_enough(plain, best, simple)):
            return Choice(best.layout, _why(simple, best, result.legal), searched=True)
    return Choice(plain.layout if plain.layout != before else None, why, helps=None if fits else helps)


def _is_good_enough(plain: Scored, best: Scored, simple: Plan) -> bool:
    """Whether ``plain``, which fits, should be written rather than what the search chose."""
    plain_tight, best_tight = (is_tight(one.memory, simple.hardware) for one in (plain, best))
    if plain_tight != best_tight:
        return best_tight
    return best.seconds > (1 - WORTH) * plain.seconds


def _layout_under(path: Path, values: Mapping[str, object]) -> Layout:
    """Of the run file at ``path`` with other ``values``."""
    return layout_of(of_job(check(load(path, [f"{key}={value_text(value)}" for key, value in values.items()]))))


def _why(simple: Plan, best: Scored, legal: int) -> str:
    roomy = "" if is_tight(best.memory, simple.hardware) else " that is not tight"
    takes = f"{short(simple.time.seconds)} a step{', tightly' if simple.tight else ''}" if simple.fits else "too large"
    first = f"{simple.workload.mesh} with recompute {simple.workload.recompute}, {takes}"
    return f"of {legal:,} layouts it has the fastest{roomy}; by rule of thumb it would be {first}"
