"""Pipeline schedules as tables of actions, and a simulator that runs them. No torch.

The tables are those of ``torch.distributed.pipelining`` 2.13, made here because a planner cannot wait
for torch to be imported; ``tests/plan/test_schedule_tables.py`` holds every table against torch's own. The
orders are those of GPipe (arXiv 1811.06965), 1F1B and its interleaved form (arXiv 2104.04473),
breadth-first (arXiv 2211.05953), zero bubble (arXiv 2401.10241, 2405.15362) and DualPipe
(arXiv 2412.19437).

Kinds: F forward; B backward; I the part of backward that gives the gradient of the input, W the part
that gives those of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, repeat
from typing import Literal, NamedTuple

from koushi.schedules import SCHEDULES, rank_of_stage, stages_of_rank

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_WHOLE: tuple[Kind, ...] = ("F", "B")
_PLACES = {kind: place for place, kind in enumerate(KINDS)}


class Action(NamedTuple):
    """One stage's work on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


Order = tuple[Action, ...]
"""What one rank does, first to last."""


@lru_cache(maxsize=256)
def actions(schedule: str, pp: int, n_stages: int, microbatches: int) -> tuple[Order, ...]:
    """The order of every pipeline coordinate.

    ``schedule`` is a name of ``koushi.schedules.SCHEDULES``; the numbers must suit it
    (``koushi.schedules.microbatches_fit``). Where torch runs a forward and a backward as one
    overlapped action (DualPipeV), the forward comes first.
    """
    return tuple(order_of_rank(schedule, pp, n_stages, microbatches, rank) for rank in range(pp))


@lru_cache(maxsize=1024)
def order_of_rank(schedule: str, pp: int, n_stages: int, microbatches: int, rank: int) -> Order:
    """The same for one pipeline coordinate."""
    makers = {
        "GPipe": _gpipe,
        "1F1B": _one_forward_one_backward,
        "Interleaved1F1B": _interleaved,
        "LoopedBFS": _breadth_first,
        "InterleavedZeroBubble": _interleaved_zero_bubble,
        "ZBVZeroBubble": _zbv,
        "DualPipeV": _dual_pipe,
    }
    return makers[schedule](pp, stages_of_rank(schedule, pp, n_stages, rank), microbatches, rank)


@lru_cache(maxsize=4096)
def _of_stage(kind: Kind, stage: int, microbatches: int) -> Order:
    """One stage's actions of a kind, the same objects in every schedule."""
    return tuple(Action(kind, stage, m) for m in range(microbatches))


def _gpipe(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    (stage,) = stages
    return (*_of_stage("F", stage, microbatches), *_of_stage("B", stage, microbatches))


def _breadth_first(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    forward = (_of_stage("F", stage, microbatches) for stage in stages)
    backward = (_of_stage("B", stage, microbatches)[::-1] for stage in reversed(stages))
    return tuple(chain(*forward, *backward))


def _one_forward_one_backward(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    (stage,) = stages
    forward, backward = (_of_stage(kind, stage, microbatches) for kind in _WHOLE)
    return _in_turns(forward, (backward,), ahead=pp - 1 - rank)


def _interleaved(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    return _in_rounds(pp, stages, microbatches, ahead=2 * (pp - 1 - rank), weights_behind=None)


def _interleaved_zero_bubble(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    return _in_rounds(pp, stages, microbatches, ahead=pp - 1 - rank, weights_behind=rank)


def _in_rounds(pp: int, stages: tuple[int, ...], microbatches: int, *, ahead: int, weights_behind: int | None) -> Order:
    """Rounds of about pp microbatches, each through all stages of the rank.

    ``ahead`` forwards more than the last rank does come before the first backward. With
    ``weights_behind`` backward is split, and the weights' part follows that many inputs' parts later.
    """
    per_round = microbatches // max(1, microbatches // pp)
    rounds = range(0, microbatches, per_round)

    def every(kind: Kind, turns: Sequence[int]) -> Order:
        of_stage = [_of_stage(kind, stage, microbatches) for stage in turns]
        return tuple(chain.from_iterable(one[first : first + per_round] for first in rounds for one in of_stage))

    ahead += (len(stages) - 1) * per_round
    forward, up = every("F", stages), stages[::-1]
    if weights_behind is None:
        return _in_turns(forward, (every("B", up),), ahead)
    weights = every("W", up)
    behind = min(weights_behind, len(weights))
    nothing = (None,) * behind
    return (*_in_turns(forward, (every("I", up), (*nothing, *weights)), ahead), *weights[len(weights) - behind :])


def _in_turns(forward: Order, backward: Sequence[Sequence[Action | None]], ahead: int) -> Order:
    """``ahead`` forwards, then in turn a forward, as long as there are any, and one of each of ``backward``."""
    coming = chain(forward[ahead:], repeat(None))
    return (*forward[:ahead], *filter(None, chain.from_iterable(zip(coming, *backward, strict=False))))


class _Writer:
    """An order being written, in which every kind of action of a stage takes its microbatches in turn."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}
        self._pending: list[tuple[int, int]] = []

    def add(self, kind: Kind, stage: int) -> int:
        """The next microbatch of ``stage``; a whole backward counts as an I and a W."""
        key: tuple[Kind, int] = ("I" if kind == "B" else kind, stage)
        microbatch = self._next.get(key, 0)
        self._next[key] = microbatch + 1
        self.order.append(Action(kind, stage, microbatch))
        return microbatch

    def add_inputs(self, stage: int) -> None:
        """An I whose W is left for ``add_oldest_weights``."""
        self._pending.append((stage, self.add("I", stage)))

    def add_oldest_weights(self) -> None:
        if self._pending:
            self.order.append(Action("W", *self._pending.pop(0)))


_SPLIT: tuple[Kind, ...] = ("F", "I", "W")


def _zbv(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    down, up = stages
    at_least = max(2 * pp - 1, microbatches)  # a shorter run is a longer one with actions left out
    ahead = 2 * (pp - rank) - 1
    write = _Writer()
    for _ in range(ahead):
        write.add("F", down)
    for _ in range(rank):
        write.add("F", up)
        write.add("F", down)
    for _ in range(pp - rank):
        for kind in _SPLIT:
            write.add(kind, up)
    for index in range(at_least - pp):
        if index < at_least - ahead - rank:
            write.add("F", down)
        write.add("I", down)
        write.add("W", down)
        for kind in _SPLIT:
            write.add(kind, up)
    for _ in range(rank):
        write.add("I", down)
        write.add("I", up)
    for _ in range(pp - rank):
        write.add("I", down)
        write.add("W", down)
    for stage in (up, down):
        for _ in range(rank):
            write.add("W", stage)
    return tuple(action for action in write.order if action.microbatch < microbatches)


def _dual_pipe(pp: int, stages: tuple[int, ...], microbatches: int, rank: int) -> Order:
    down, up = stages
    behind = pp - 1 - rank
    write = _Writer()
    for _ in range(2 * behind):
        write.add("F", down)
    for _ in range(rank + 1):
        write.add("F", down)
        write.add("F", up)
    for _ in range(behind):
        write.add_inputs(up)
        write.add_oldest_weights()
        write.add("F", up)
    for _ in range(microbatches - 2 * pp + rank + 1):
        write.add("F", down)
        write.add("B", up)
        write.add("F", up)
        write.add("B", down)
    for _ in range(behind):
        write.add("B", up)
        write.add("F", up)
        write.add("B", down)
    _dual_pipe_end(write, stages, rank, behind)
    return tuple(write.order)


def _dual_pipe_end(write: _Writer, stages: tuple[int, ...], rank: int, behind: int) -> None:
    """Backwards after the last forward; from half way on with their weights' part put off."""
    down, up = stages
    half = (rank + 1) // 2
    for index in range(rank + 1):
        for stage, split in ((up, index >= half + (rank + 1) % 2), (down, index >= half)):
            if split:
                write.add_inputs(stage)
            else:
                write.add("B", stage)
    for _ in range(behind):
        write.add_oldest_weights()
        write.add_inputs(down)
    for _ in range(rank + 1):
        write.add_oldest_weights()


@lru_cache(maxsize=256)
def in_flight(schedule: str, pp: int, n_stages: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Of every pipeline coordinate: microbatches kept for backward by each of its stages when they are the most.

    A microbatch is kept from its forward to the end of its backward; a split backward ends with W.
    """
    found = []
    for rank, order in enumerate(actions(schedule, pp, n_stages, microbatches)):
        kept = dict.fromkeys(stages_of_rank(schedule, pp, n_stages, rank), 0)
        now, most, at_most = 0, 0, tuple(kept.values())
        for kind, stage, _ in order:
            if kind == "F":
                kept[stage] += 1
                now += 1
                if now > most:
                    most, at_most = now, tuple(kept.values())
            elif kind != "I":
                kept[stage] -= 1
                now -= 1
        found.append(at_most)
    return tuple(found)


@dataclass(frozen=True)
class Table:
    """All actions in an order in which each comes after what it waits for."""

    orders: tuple[Order, ...]
    ranks: tuple[int, ...]
    costs: tuple[int, ...]
    """Of every action, where its seconds stand: KINDS of stage 0, then of stage 1 and so on."""
    waits: tuple[int, ...]
    """The action on another rank whose result it needs, -1 for none."""
    work: tuple[tuple[tuple[int, int], ...], ...]
    """Of every rank: how often it does what stands at which cost."""
    leaves: tuple[bool, ...]
    """By the same places: whether the result goes to another rank."""


@lru_cache(maxsize=128)
def table(schedule: str, pp: int, n_stages: int, microbatches: int) -> Table:
    """The table of a schedule; a forward waits for the stage before, a backward for the stage after."""
    orders = actions(schedule, pp, n_stages, microbatches)
    holders = [rank_of_stage(schedule, pp, n_stages, stage) for stage in range(n_stages)]
    each, places, not_yet = len(KINDS), _PLACES, -2
    # By stage and microbatch, the forward or backward that is in the order; before the first and after the last stage
    # there is none to wait for.
    down, up = [not_yet] * (n_stages * microbatches), [not_yet] * (n_stages * microbatches)
    down, up = [-1] * microbatches + down, up + [-1] * microbatches
    ranks: list[int] = []
    costs: list[int] = []
    waits: list[int] = []
    heads, wholes = [0] * pp, [0] * n_stages
    number, every = 0, sum(len(order) for order in orders)
    while number < every:
        before = number
        for rank, order in enumerate(orders):
            began, head, end = number, heads[rank], len(order)
            while head < end:
                kind, stage, microbatch = order[head]
                place = stage * microbatches + microbatch
                if kind == "F":
                    wait = down[place]
                    if wait == not_yet:
                        break
                    down[place + microbatches] = number
                elif kind == "W":
                    wait = -1
                else:
                    wait = up[place + microbatches]
                    if wait == not_yet:
                        break
                    up[place] = number
                    if kind == "B":
                        wholes[stage] += 1
                costs.append(stage * each + places[kind])
                waits.append(wait)
                head += 1
                number += 1
            if number > began:
                heads[rank] = head
                ranks += [rank] * (number - began)
        assert number > before, f"{schedule} over {pp} ranks with {microbatches} microbatches waits for itself"
    if SCHEDULES[schedule].v_shaped:
        waits = [-1 if wait >= 0 and ranks[wait] == rank else wait for wait, rank in zip(waits, ranks, strict=True)]
    leaves = tuple(_leaves(holders, kind, stage) for stage in range(n_stages) for kind in KINDS)
    work = _work(pp, holders, microbatches, wholes)
    return Table(orders, tuple(ranks), tuple(costs), tuple(waits), work, leaves)


def _work(
    pp: int, holders: Sequence[int], microbatches: int, wholes: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of every rank; ``wholes``: by stage, how many of its backwards are not split."""
    work: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    for stage, (holder, whole) in enumerate(zip(holders, wholes, strict=True)):
        halves = microbatches - whole
        times = zip(
            range(stage * len(KINDS), (stage + 1) * len(KINDS)), (microbatches, whole, halves, halves), strict=True
        )
        work[holder] += [(cost, count) for cost, count in times if count]
    return tuple(map(tuple, work))


def _leaves(holders: Sequence[int], kind: Kind, stage: int) -> bool:
    target = stage + 1 if kind == "F" else stage - 1
    return kind != "W" and 0 <= target < len(holders) and holders[target] != holders[stage]


@dataclass(frozen=True)
class StageSeconds:
    """What one stage's work on one microbatch takes."""

    forward: float
    inputs: float
    """The part of backward that gives the gradient of the stage's input."""
    weights: float
    joint: float | None = None
    """A whole backward, where that is not the sum of its parts."""

    @property
    def backward(self) -> float:
        return self.inputs + self.weights if self.joint is None else self.joint


@dataclass(frozen=True)
class Timeline:
    """A simulated step's pipeline: when everything happens, from the first forward on."""

    table: Table
    ends: tuple[float, ...]
    seconds: tuple[float, ...]
    """By the table's ``costs``."""
    makespan: float
    busy: tuple[float, ...]
    """Seconds of work of every rank."""

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time until the last is done."""
        if not self.makespan:
            return 0.0
        return max(0.0, 1 - sum(self.busy) / (self.makespan * len(self.busy)))

    @cached_property
    def by_rank(self) -> tuple[tuple[tuple[Action, float, float], ...], ...]:
        """Every rank's actions with their start and end."""
        found: list[list[tuple[Action, float, float]]] = [[] for _ in self.busy]
        for rank, cost, end in zip(self.table.ranks, self.table.costs, self.ends, strict=True):
            action = self.table.orders[rank][len(found[rank])]
            found[rank].append((action, end - self.seconds[cost], end))
        return tuple(tuple(each) for each in found)


def simulate(
    schedule: str,
    pp: int,
    n_stages: int,
    microbatches: int,
    stages: Sequence[StageSeconds],
    send: float,
    *,
    blocking: bool = False,
) -> Timeline:
    """Run a schedule: every rank does its actions in order, each as soon as what it needs has arrived.

    ``stages`` gives every stage's seconds, ``send`` those of a message between two ranks. ``blocking``: the
    sender does nothing meanwhile.
    """
    made = table(schedule, pp, n_stages, microbatches)
    seconds = tuple(value for stage in stages for value in (stage.forward, stage.backward, stage.inputs, stage.weights))
    held = [send if blocking and leaves else 0.0 for leaves in made.leaves]
    free = [0.0] * pp
    ends: list[float] = []
    append = ends.append
    for rank, cost, wait in zip(made.ranks, made.costs, made.waits, strict=True):
        start = free[rank]
        if wait >= 0:
            arrived = ends[wait] + send
            if arrived > start:
                start = arrived
        end = start + seconds[cost]
        free[rank] = end + held[cost]
        append(end)
    busy = tuple(sum(times * seconds[cost] for cost, times in work) for work in made.work)
    return Timeline(made, tuple(ends), seconds, max(free), busy)
