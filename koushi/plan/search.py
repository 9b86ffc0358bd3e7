"""The best layouts of a run on so many devices: every legal one is considered, few are judged in full. No torch.

Best first: layouts are grouped by what their costs have in common, each group has a bound that no member
beats, and the group with the lowest bound is opened next. What can neither be among the fastest nor be
smaller than all that is faster is never opened, and what is too large as a whole waits until it is asked how
much was missing, so that nothing is lost (``tests/plan/test_search.py``).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from koushi.hardware.hardware import Hardware
from koushi.plan.layouts import (
    Layout,
    Pipeline,
    Question,
    Split,
    modes,
    pipelines,
    reshard_choices,
    shards,
    splits,
)
from koushi.plan.moments import FAMILIES, Family
from koushi.plan.plan import TIGHT
from koushi.plan.score import Costs, Scored
from koushi.plan.workload import Recompute, Workload

BEST = 4
"""Pairs of tp and pp that are ranked."""
SLOWEST = 1.25
"""Of the front: how many times as long as the fastest a step may take."""
MISSES = 3
"""Layouts shown that would be faster but do not fit."""
MOST_MISSES = 24
"""Layouts planned in full for those."""
WEIGHED = 60
"""Where nothing fits: layouts planned in full for the smallest. Jobs far too large for their devices have many with
nearly the same bound."""

Degrees = tuple[int, int]
"""tp and pp."""


@dataclass(frozen=True)
class SearchResult:
    """What a search has found; empty where nothing fits."""

    best: tuple[Scored, ...]
    """The fastest layout of every pair of tp and pp, fastest first, up to ``BEST``."""
    front: tuple[Scored, ...]
    """Layouts that no other beats in both memory and speed, fastest first, up to ``SLOWEST`` times the fastest."""
    misses: tuple[Scored, ...]
    """Faster than the best, but too large: the smallest, as far as was looked; where nothing fits, what is nearest."""
    legal: int
    """Layouts considered."""
    judged: int
    """Pipelines simulated; layouts that only differ in how data parallel shards share one."""
    capacity: float
    """Bytes of a device."""

    def is_tight(self, one: Scored) -> bool:
        """Whether it fits with little room."""
        return TIGHT * self.capacity < one.memory <= self.capacity

    @property
    def chosen(self) -> Scored | None:
        """The fastest that does not fit tightly; where none is in the front, the fastest. None: nothing fits."""
        return next((one for one in self.front if not self.is_tight(one)), self.best[0] if self.best else None)


class _Group(NamedTuple):
    """Layouts that share a division of devices and recompute."""

    split: Split
    recompute: Recompute


class _Family(NamedTuple):
    """Those of a group whose schedules are of one family."""

    split: Split
    recompute: Recompute
    family: Family


class _Piped(NamedTuple):
    """Layouts that share a pipeline as well."""

    split: Split
    recompute: Recompute
    pipeline: Pipeline


class _One(NamedTuple):
    """A single layout."""

    split: Split
    layout: Layout
    memory: float
    """A bound."""
    exact: bool
    """Whether the pipeline has been simulated."""


class _Fewer(NamedTuple):
    """Layouts that have fewer shards than one that is too large by its bound, and larger bounds; they may be faster."""

    one: _One


_Item = Split | _Group | _Piped | _One
_TooLarge = Split | _Family | _Fewer | _One


def search(question: Question, base: Workload, hardware: Hardware) -> SearchResult:
    """Rank every layout of ``question``; ``base`` gives what stays as it is."""
    return _Search(question, base, hardware).run()


class _Search:
    """One search under way."""

    def __init__(self, question: Question, base: Workload, hardware: Hardware):
        self.question = question
        self.costs = Costs(base, hardware)
        self.found = _Found()
        self._order = count()
        self._heap: list[tuple[float, int, _Item]] = []
        """By a bound of their seconds."""
        self._too_large: list[tuple[float, int, float, _TooLarge]] = []
        """What came up and does not fit, by a bound of its memory, with one of its seconds."""

    def run(self) -> SearchResult:
        costs = self.costs
        for split in splits(self.question):
            memory = costs.room.split_floor(split, split.data_parallel)
            if memory > costs.capacity:
                self._set_aside(memory, 0.0, split)
            else:
                self._push(costs.split_floor(split), split)
        while self._heap:
            floor, _, item = heappop(self._heap)
            if floor > self.found.slowest_wanted:
                break
            if isinstance(item, _One):
                self._judge(item, floor)
            elif isinstance(item, _Piped):
                self._spread(item, floor)
            elif isinstance(item, _Group):
                self._open(item, floor)
            else:
                for recompute in modes(self.question):
                    self._push(costs.group_floor(item, recompute), _Group(item, recompute))
        misses = self._misses() if self.found.fastest else self._smallest()
        best, front = self.found.ranked()
        return SearchResult(best, front, misses, legal_count(self.question), costs.simulated, costs.capacity)

    def _smallest(self) -> tuple[Scored, ...]:
        """What needs the least memory; a bound of it leads to what has closer ones, until none can be less, or
        ``WEIGHED`` have been planned."""
        costs, order, left = self.costs, count(), WEIGHED
        waiting: list[tuple[float, int, Split | _Family | _One]] = []
        for split in splits(self.question):
            heappush(waiting, (costs.room.split_floor(split, split.data_parallel), next(order), split))
        found: list[tuple[float, Layout]] = []
        while waiting:
            floor, _, item = heappop(waiting)
            if len(found) == MISSES and floor >= found[-1][0]:
                break
            if isinstance(item, _One):
                insort(found, (costs.memory(item.layout), item.layout))
                del found[MISSES:]
                left -= 1
                if not left:
                    break
                continue
            for memory, part in self._parts(item):
                if len(found) < MISSES or memory < found[-1][0]:
                    heappush(waiting, (memory, next(order), part))
        return tuple(Scored(layout, costs.step_seconds(layout), memory) for memory, layout in found)

    def _parts(self, item: Split | _Family) -> Iterator[tuple[float, _Family | _One]]:
        """Of a split its families, of a family its layouts, each with a bound of its memory."""
        costs = self.costs
        if isinstance(item, Split):
            schedules = {pipeline.schedule for pipeline in pipelines(self.question, item.pp, item.microbatches)}
            for recompute in modes(self.question):
                for family in {FAMILIES[schedule]: None for schedule in sorted(schedules)}:
                    yield costs.family_memory_floor(item, recompute, family), _Family(item, recompute, family)
            return
        split, recompute, family = item
        for pipeline in pipelines(self.question, split.pp, split.microbatches):
            if FAMILIES[pipeline.schedule] == family:
                for layout in spread(self.question, split, recompute, pipeline):
                    memory = costs.memory_floor(split, layout)
                    yield memory, _One(split, layout, memory, exact=False)

    def _misses(self) -> tuple[Scored, ...]:
        """Faster than the fastest, but too large: the smallest of the first ``MOST_MISSES`` by a bound of memory."""
        costs, fastest, left = self.costs, self.found.front[0].seconds, MOST_MISSES
        found: list[tuple[float, Layout, float]] = []
        while self._too_large and left:
            memory, _, floor, item = heappop(self._too_large)
            if len(found) == MISSES and memory >= found[-1][0]:
                break
            if isinstance(item, Split):
                if (floor := costs.split_floor(item)) < fastest:
                    for least, part in self._parts(item):
                        self._set_aside(least, floor, part)
            elif isinstance(item, _Family):
                self._spread_family(item, fastest)
            elif isinstance(item, _Fewer):
                self._go_on(item, floor)
            else:
                layout, floor = item.layout, max(floor, costs.layout_floor(item.split, item.layout))
                if floor < fastest:
                    left -= 1
                    if (seconds := costs.seconds(item.split, layout)) < fastest:
                        insort(found, (costs.memory(layout), layout, seconds))
                        del found[MISSES:]
        return tuple(Scored(layout, seconds, memory) for memory, layout, seconds in found)

    def _go_on(self, item: _Fewer, floor: float) -> None:
        """From where ``_spread`` broke off."""
        split, layout, most, _ = item.one
        for other in spread(self.question, split, layout.recompute, layout.pipeline):
            if other.reshard_after_forward == layout.reshard_after_forward and other.dp_shard < layout.dp_shard:
                memory = self.costs.memory_floor(split, other)
                if memory >= most:  # else it has been weighed
                    self._set_aside(memory, floor, _One(split, other, memory, exact=False))

    def _spread_family(self, item: _Family, fastest: float) -> None:
        """Over those of a family that are fast enough, all of them too large."""
        split, recompute, family = item
        if self.costs.group_floor(split, recompute) >= fastest:
            return
        for pipeline in pipelines(self.question, split.pp, split.microbatches):
            if FAMILIES[pipeline.schedule] == family:
                floor = self.costs.pipeline_floor(split, recompute, pipeline)
                if floor < fastest:
                    self._spread(_Piped(split, recompute, pipeline), floor)

    def _push(self, floor: float, item: _Item) -> None:
        if floor <= self.found.slowest_wanted:
            heappush(self._heap, (floor, next(self._order), item))

    def _set_aside(self, memory: float, floor: float, item: _TooLarge) -> None:
        if not self.found.front or floor < self.found.front[0].seconds:
            heappush(self._too_large, (memory, next(self._order), floor, item))

    def _open(self, group: _Group, floor: float) -> None:
        """A family that is too large as a whole is set aside as a whole."""
        costs, (split, recompute) = self.costs, group
        may_fit: dict[Family, bool] = {}
        for pipeline in pipelines(self.question, group.split.pp, group.split.microbatches):
            family = FAMILIES[pipeline.schedule]
            if family not in may_fit:
                memory = costs.family_memory_floor(split, recompute, family)
                may_fit[family] = memory <= costs.capacity
                if not may_fit[family]:
                    self._set_aside(memory, floor, _Family(split, recompute, family))
            if may_fit[family]:
                self._push(costs.pipeline_floor(split, recompute, pipeline), _Piped(split, recompute, pipeline))

    def _spread(self, group: _Piped, group_floor: float) -> None:
        """Over the ways in which data parallel shards."""
        split, recompute, pipeline = group.split, group.recompute, group.pipeline
        for layout in spread(self.question, split, recompute, pipeline):
            memory = self.costs.memory_floor(split, layout)
            self._weigh(split, layout, group_floor, memory)
            if memory > self.costs.capacity and not layout.reshard_after_forward:
                # Fewer shards are larger still, and gathered parameters that stay come last.
                self._set_aside(memory, group_floor, _Fewer(_One(split, layout, memory, exact=False)))
                break
        else:
            return
        # But where nothing is cut, nothing is gathered.
        whole = layout._replace(dp_replicate=split.data_parallel, dp_shard=1)
        if (
            1 in shards(self.question, split.data_parallel)
            and (least := self.costs.memory_floor(split, whole)) < memory
        ):
            self._weigh(split, whole, group_floor, least)

    def _weigh(self, split: Split, layout: Layout, floor: float, memory: float) -> None:
        """Set a layout aside as too large, or ask again when its turn comes; ``memory`` is a bound."""
        if memory > self.costs.capacity:
            self._set_aside(memory, floor, _One(split, layout, memory, exact=False))
        elif not self.found.is_beaten(floor, memory, layout):
            floor = self.costs.layout_floor(split, layout)
            if not self.found.is_beaten(floor, memory, layout):
                self._push(floor, _One(split, layout, memory, exact=False))

    def _judge(self, one: _One, floor: float) -> None:
        """In the order of what each step costs; memory's bound gets closer with every rank."""
        costs, layout = self.costs, one.layout
        if self.found.is_beaten(floor, one.memory, layout):
            return
        if not one.exact:
            memory = one.memory
            if not costs.has_run(one.split, layout):
                # Memory of one rank is quicker than the pipeline, and often enough to know better.
                memory = max(memory, next(costs.memory_so_far(layout)))
                if memory > costs.capacity:
                    self._set_aside(memory, floor, one)
                    return
                if self.found.is_beaten(floor, memory, layout):
                    return
            self._push(costs.simulated_floor(one.split, layout), one._replace(memory=memory, exact=True))
            return
        seconds = floor
        for looked_at, memory in enumerate(costs.memory_so_far(layout)):
            if memory > costs.capacity:
                self._set_aside(memory, floor, one)
                return
            if self.found.is_beaten(seconds, max(one.memory, memory), layout):
                return
            if looked_at == 0:  # not before: one rank's memory is quicker than the exact time, and often enough
                seconds = costs.seconds(one.split, layout)
                if self.found.is_beaten(seconds, max(one.memory, memory), layout):
                    return
        if not self.found.is_beaten(seconds, memory, layout):
            self.found.add(Scored(layout, seconds, memory))


class _Found:
    """What has been judged so far and fits."""

    def __init__(self) -> None:
        self.fastest: dict[Degrees, Scored] = {}
        self._ranked: list[float] = []
        """Seconds of the fastest of each, in order."""
        self.front: list[Scored] = []
        """By seconds; memory falls along it."""
        self.slowest_wanted = inf
        """Seconds beyond which nothing is of interest."""

    def is_beaten(self, floor: float, memory: float, layout: Layout) -> bool:
        """Whether a layout of this memory that takes at least ``floor`` can change nothing."""
        if self.may_lead(floor, layout):
            return False
        place = bisect_right(self.front, floor, key=lambda one: one.seconds)
        return place > 0 and self.front[place - 1].memory <= memory

    def may_lead(self, floor: float, layout: Layout) -> bool:
        """Whether a layout that takes at least ``floor`` may be the fastest of its tp and pp, and those be ranked."""
        before = self.fastest.get(degrees_of(layout))
        return floor <= self._last_ranked() and (before is None or floor <= before.seconds)

    def add(self, scored: Scored) -> None:
        degrees = degrees_of(scored.layout)
        before = self.fastest.get(degrees)
        if before is None or scored.rank < before.rank:
            self.fastest[degrees] = scored
            self._ranked = sorted(one.seconds for one in self.fastest.values())
        if not any(one.seconds <= scored.seconds and one.memory <= scored.memory for one in self.front):
            kept = [one for one in self.front if one.seconds < scored.seconds or one.memory < scored.memory]
            self.front = sorted([*kept, scored], key=lambda one: one.rank)
        self.slowest_wanted = max(self._last_ranked(), SLOWEST * self.front[0].seconds)

    def _last_ranked(self) -> float:
        return self._ranked[BEST - 1] if len(self._ranked) >= BEST else inf

    def ranked(self) -> tuple[tuple[Scored, ...], tuple[Scored, ...]]:
        """The fastest of each tp and pp, and the front."""
        best = tuple(sorted(self.fastest.values(), key=lambda one: one.rank)[:BEST])
        limit = SLOWEST * best[0].seconds if best else 0.0
        front = tuple(one for one in self.front if one.seconds <= limit)
        return best, front


def degrees_of(layout: Layout) -> Degrees:
    return (layout.tp, layout.pp)


def spread(question: Question, split: Split, recompute: Recompute, pipeline: Pipeline) -> Iterator[Layout]:
    """Every way for data parallel to shard and to replicate, most shards first."""
    for reshard in reshard_choices(question, split):
        for shard in reversed(shards(question, split.data_parallel)):
            replicas = split.data_parallel // shard
            yield Layout(split.tp, pipeline, replicas, shard, split.microbatch_size, recompute, reshard)


def legal_count(question: Question) -> int:
    """How many layouts there are, without making each."""
    return sum(
        len(modes(question)) * len(shards(question, one.data_parallel)) * len(reshard_choices(question, one))
        for one in splits(question)
        for pipeline in pipelines(question, one.pp, one.microbatches)
    )
