"""The best layouts of a run on so many devices: every legal one is considered, few are judged in full. No torch.

Best first: layouts are grouped by what their costs have in common, each group has a bound that no member
beats, and the group with the lowest bound is opened next. What can neither be among the fastest nor be
smaller than all that is faster is never opened, so that nothing is lost (``tests/plan/test_search.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from koushi.hardware.hardware import Hardware
from koushi.plan.layouts import (
    Layout,
    Pipeline,
    Question,
    Split,
    divisors,
    pipelines,
    recompute_modes,
    reshard_choices,
    splits,
)
from koushi.plan.score import Costs, Scored
from koushi.plan.workload import Recompute, Workload

BEST = 6
"""Meshes that are ranked."""
SLOWEST = 1.25
"""Of the front: how many times as long as the fastest a step may take."""
MISSES = 3
"""Layouts shown that would be faster but do not fit."""

Mesh = tuple[int, int, int, int]


@dataclass(frozen=True)
class SearchResult:
    """What a search has found; empty where nothing fits."""

    best: tuple[Scored, ...]
    """The fastest layout of every mesh, fastest first, up to ``BEST``."""
    front: tuple[Scored, ...]
    """Layouts that no other beats in both memory and speed, fastest first, up to ``SLOWEST`` times the fastest."""
    misses: tuple[Scored, ...]
    """Faster than the best, but too large: the smallest of them."""
    legal: int
    """Layouts considered."""
    judged: int
    """Layouts whose pipeline was simulated."""


@dataclass(frozen=True)
class _Group:
    """Layouts that share a division of devices, recompute, and, once opened, a pipeline."""

    split: Split
    recompute: Recompute
    pipeline: Pipeline | None


def search(question: Question, base: Workload, hardware: Hardware) -> SearchResult:
    """Rank every layout of ``question``; ``base`` gives what stays as it is."""
    return _Search(question, base, hardware).run()


class _Search:
    """One search under way."""

    def __init__(self, question: Question, base: Workload, hardware: Hardware):
        self.question = question
        self.costs = Costs(base, hardware)
        self.found = _Found()
        self.judged = 0
        self._order = count()
        self._heap: list[tuple[float, int, _Group | tuple[Split, Layout]]] = []

    def run(self) -> SearchResult:
        for split in splits(self.question):
            for recompute in ("none", "selective", "full"):
                if self.costs.room.split_floor(split, recompute, split.data_parallel) <= self.costs.capacity:
                    self._push(self.costs.split_floor(split, recompute), _Group(split, recompute, None))
        while self._heap:
            floor, _, item = heappop(self._heap)
            if floor > self.found.slowest_wanted:
                break
            if isinstance(item, tuple):
                self._judge(*item, floor)
            elif item.pipeline is None:
                self._open(item)
            else:
                self._spread(item, item.pipeline)
        return self.found.result(legal_count(self.question), self.judged)

    def _push(self, floor: float, item: _Group | tuple[Split, Layout]) -> None:
        heappush(self._heap, (floor, next(self._order), item))

    def _open(self, group: _Group) -> None:
        split = group.split
        for pipeline in pipelines(self.question, split.pp, split.microbatches):
            if group.recompute in recompute_modes(pipeline):
                floor = self.costs.pipeline_floor(split, group.recompute, pipeline)
                if floor > self.found.slowest_wanted:
                    continue
                memory = self.costs.memory_floor(split, group.recompute, pipeline, split.data_parallel)
                if memory <= self.costs.capacity:
                    self._push(floor, _Group(split, group.recompute, pipeline))

    def _spread(self, group: _Group, pipeline: Pipeline) -> None:
        """Over the ways in which data parallel shards."""
        split = group.split
        for layout in spread(split, group.recompute, pipeline):
            memory = self.costs.memory_floor(split, group.recompute, pipeline, layout.dp_shard)
            if memory > self.costs.capacity:
                continue
            floor = self.costs.layout_floor(split, layout)
            if floor <= self.found.slowest_wanted and not self.found.is_beaten(floor, memory, layout):
                self._push(floor, (split, layout))

    def _judge(self, split: Split, layout: Layout, floor: float) -> None:
        """In the order of what each step costs: memory's bound, the simulated pipeline, memory itself."""
        least = self.costs.memory_floor(split, layout.recompute, layout.pipeline, layout.dp_shard)
        if self.found.is_beaten(floor, least, layout):
            return
        self.judged += 1
        seconds = self.costs.seconds(layout)
        if self.found.is_beaten(seconds, least, layout):
            return
        memory = self.costs.memory(layout)
        if memory > self.costs.capacity:
            self.found.too_large.append(Scored(layout, seconds, memory))
        else:
            self.found.add(Scored(layout, seconds, memory))


class _Found:
    """What has been judged so far and fits."""

    def __init__(self) -> None:
        self.fastest: dict[Mesh, Scored] = {}
        self.front: list[Scored] = []
        """By seconds; memory falls along it."""
        self.too_large: list[Scored] = []
        self.slowest_wanted = float("inf")
        """Seconds beyond which nothing is of interest."""

    def is_beaten(self, floor: float, memory: float, layout: Layout) -> bool:
        """Whether a layout of this memory that takes at least ``floor`` can change nothing."""
        before = self.fastest.get(mesh_of(layout))
        if before is None and floor <= self._last_ranked():
            return False
        if before is not None and floor <= before.seconds and floor <= self._last_ranked():
            return False
        place = bisect_right(self.front, floor, key=lambda one: one.seconds)
        return place > 0 and self.front[place - 1].memory <= memory

    def add(self, scored: Scored) -> None:
        mesh = mesh_of(scored.layout)
        before = self.fastest.get(mesh)
        if before is None or scored.rank < before.rank:
            self.fastest[mesh] = scored
        if not any(one.seconds <= scored.seconds and one.memory <= scored.memory for one in self.front):
            kept = [one for one in self.front if one.seconds < scored.seconds or one.memory < scored.memory]
            self.front = sorted([*kept, scored], key=lambda one: one.rank)
        self.slowest_wanted = max(self._last_ranked(), SLOWEST * self.front[0].seconds)

    def _last_ranked(self) -> float:
        if len(self.fastest) < BEST:
            return float("inf")
        return sorted(one.seconds for one in self.fastest.values())[BEST - 1]

    def result(self, legal: int, judged: int) -> SearchResult:
        best = tuple(sorted(self.fastest.values(), key=lambda one: one.rank)[:BEST])
        limit = SLOWEST * best[0].seconds if best else 0.0
        front = tuple(one for one in self.front if one.seconds <= limit)
        return SearchResult(best, front, self._misses(best), legal, judged)

    def _misses(self, best: tuple[Scored, ...]) -> tuple[Scored, ...]:
        faster = [one for one in self.too_large if not best or one.seconds < best[0].seconds]
        return tuple(sorted(faster, key=lambda one: (one.memory, one.layout))[:MISSES])


def mesh_of(layout: Layout) -> Mesh:
    return (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)


def spread(split: Split, recompute: Recompute, pipeline: Pipeline) -> Iterator[Layout]:
    """Every way for data parallel to shard and to replicate."""
    for shard in divisors(split.data_parallel):
        for reshard in reshard_choices(split):
            replicas = split.data_parallel // shard
            yield Layout(split.tp, pipeline, replicas, shard, split.microbatch_size, recompute, reshard)


def legal_count(question: Question) -> int:
    """How many layouts there are, without making each."""
    return sum(
        len(recompute_modes(pipeline)) * len(divisors(one.data_parallel)) * len(reshard_choices(one))
        for one in splits(question)
        for pipeline in pipelines(question, one.pp, one.microbatches)
    )
