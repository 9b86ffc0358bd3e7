"""How much a rank of a pipeline has in flight at moments that every step of its schedule has, in counts. No torch.

The moments are those at which the first backward begins, and at which a later one does while gradients are added up.
Counts hold for any sizes of layers and of ends, so that a search works them out once for all its layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple

from koushi.plan.layouts import Pipeline, layers_of
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.schedules import SCHEDULES, stages_of_rank

Family = Literal["in phases", "in turns", "v-shaped"]
FAMILIES: dict[str, Family] = {
    "GPipe": "in phases",
    "1F1B": "in turns",
    "Interleaved1F1B": "in turns",
    "LoopedBFS": "in phases",
    "InterleavedZeroBubble": "in turns",
    "ZBVZeroBubble": "v-shaped",
    "DualPipeV": "v-shaped",
}
"""Schedules by when the first backward begins: after every forward; as soon as microbatches have come back up; and, on
stages that go down the ranks and back up, likewise."""


class Moment(NamedTuple):
    """How far a rank has come; forwards go through its stages in rounds, backwards through the stages in reverse."""

    forwards: int
    backwards: int
    """Begun."""
    freed: int
    """Backwards that are done with their microbatch; fewer than have begun where backward is split."""


class Counts(NamedTuple):
    """So many times what a layer has, and what the first, a middle and the last stage have besides."""

    layers: int = 0
    first: int = 0
    middle: int = 0
    last: int = 0

    def of(self, sizes: tuple[int, int, int, int]) -> int:
        """All of it, with a layer of the first of ``sizes``, and so on."""
        layer, first, middle, last = sizes
        return self.layers * layer + self.first * first + self.middle * middle + self.last * last


NO_COUNTS, ONE_MIDDLE = Counts(), Counts(middle=1)


class AtMoment(NamedTuple):
    """What a rank holds as a backward begins."""

    kept: Counts
    """Of microbatches, for backward."""
    halves: Counts
    """Of those whose backward is half done; the first stage's layers left out."""
    begun: Counts
    """Whose gradients there are."""
    summed: Counts
    """Of which of them a sum, for which another backward has to begin after one that is done."""
    acting: Counts
    """Stages in the middle that begin a backward."""
    gathered: tuple[Counts, ...]
    """Among these are those of the rank's stages that are kept gathered at once; what is done with is freed."""


class Share(NamedTuple):
    """What a rank of a pipeline holds."""

    stages: Counts
    moments: tuple[AtMoment, ...]


def per_round(schedule: str, pp: int, per_rank: int, microbatches: int) -> int:
    """Microbatches that go through one stage of a rank before the next stage has its turn."""
    if per_rank == 1 or schedule == "LoopedBFS":
        return microbatches
    return microbatches // max(1, microbatches // pp)


@cache
def moments(schedule: str, pp: int, per_rank: int, microbatches: int, rank: int) -> tuple[Moment, ...]:
    """As the first backward begins, and as a later one does when every stage has had one; where backward is split, as
    the one after the last forward does as well, before which no more has been freed than made. Not of V schedules."""
    every, each = per_rank * microbatches, per_round(schedule, pp, per_rank, microbatches)
    if FAMILIES[schedule] == "in phases":
        return tuple(Moment(every, done, done) for done in (0, 1) if done < every)
    ahead = pp - 1 - rank if schedule in ("1F1B", "InterleavedZeroBubble") else 2 * (pp - 1 - rank)
    warmup = (per_rank - 1) * each + ahead
    behind = rank if SCHEDULES[schedule].splits_backward else 0
    times = [0, (per_rank - 1) * each + 1, *([max(0, every - warmup - 1)] if behind else [])]
    return tuple(
        Moment(min(warmup + 1 + done, every), done, max(0, done - behind))
        for done in dict.fromkeys(times)
        if done < every
    )


@cache
def v_moments(pp: int, microbatches: int, rank: int) -> tuple[tuple[int, int, bool], ...]:
    """Of a V schedule: microbatches kept on the way down, and up; whether both stages' gradients are being added up."""
    down = min(microbatches, 2 * pp - rank - 1)
    found = (down, min(microbatches, rank + 1), False)
    return (found, (down, rank, True)) if microbatches > 2 * pp else (found,)


def fewest_in_flight(family: Family, pp: int, microbatches: int) -> int:
    """Of every layer of the second rank, as the first backward begins; not of V schedules."""
    return microbatches if family == "in phases" else min(pp - 1, microbatches)


def fewest_layers(n_layers: int, pp: int) -> int:
    """Of the second rank, whatever the number of virtual stages; of two ranks it has the last stage."""
    return -(-(n_layers + 2) // pp) if pp > 2 else n_layers // 2


class _Stages(NamedTuple):
    """A rank's stages, in the order in which they have their turns."""

    layers: tuple[int, ...]
    down: tuple[int, ...]
    """Sums of layers so far, from none to all, in the order of forward."""
    up: tuple[int, ...]
    """The same in the order of backward."""
    first: int
    """1: the first of the model is among them."""
    last: int

    def among(self, layers: int, count: int) -> Counts:
        """So many stages with so many layers, the ends among them."""
        return Counts(layers, self.first, count - self.first - self.last, self.last)


@cache
def _stages(n_layers: int, pp: int, per_rank: int, v_shaped: bool, rank: int) -> _Stages:
    final = pp * per_rank - 1
    held = stages_of_rank("ZBVZeroBubble" if v_shaped else "LoopedBFS", pp, final + 1, rank)
    every = layers_of(n_layers, final + 1)
    layers = tuple(every[stage] for stage in held)
    down, up = (0, *accumulate(layers)), (0, *accumulate(layers[::-1]))
    return _Stages(layers, down, up, int(held[0] == 0), int(held[-1] == final))


@cache
def share(n_layers: int, pipeline: Pipeline, microbatches: int, rank: int) -> Share:
    """Of the rank at pipeline coordinate ``rank``."""
    pp, schedule, per_rank = pipeline
    v_shaped = FAMILIES[schedule] == "v-shaped"
    stages = _stages(n_layers, pp, per_rank, v_shaped, rank)
    every = stages.among(stages.down[-1], per_rank)
    if v_shaped:
        largest = _largest(stages, 0)
        found = [
            AtMoment(_on_a_v(stages, down, up), NO_COUNTS, *(every if adding else NO_COUNTS,) * 2, NO_COUNTS, largest)
            for down, up, adding in v_moments(pp, microbatches, rank)
        ]
    else:
        each = per_round(schedule, pp, per_rank, microbatches)
        found = [
            _at_moment(stages, moment, each, microbatches)
            for moment in moments(schedule, pp, per_rank, microbatches, rank)
        ]
    return Share(every, tuple(found))


def _at_moment(stages: _Stages, moment: Moment, each: int, microbatches: int) -> AtMoment:
    done, added_up = _done(moment, each, microbatches), _added_up(moment, each)
    begun = _adding(stages, moment, each, done)
    return AtMoment(
        _kept(stages, moment, each),
        _halves(stages, moment, each),
        begun,
        begun if added_up == moment else _adding(stages, added_up, each, done),
        _acting(stages, moment, each),
        _largest(stages, done),
    )


@cache
def _largest(stages: _Stages, done: int) -> tuple[Counts, ...]:
    """The largest in the middle, and the ends, of all but those that are done with their last backward."""
    layers = stages.layers[: len(stages.layers) - done]
    first, last = stages.first, stages.last * (not done)
    ends = [Counts(layers[0], first=1)] * first + [Counts(layers[-1], last=1)] * last
    middle = sorted(layers[first : len(layers) - last])[-MOST_UNSHARDED:]
    return (*(Counts(count, middle=1) for count in middle), *ends)


def _done(moment: Moment, each: int, microbatches: int) -> int:
    """Stages that have begun every backward at one turn."""
    return moment.backwards // each if each == microbatches else 0


def _on_a_v(stages: _Stages, down: int, up: int) -> Counts:
    """What is kept of so many microbatches on the way down, and of so many on the way up."""
    first, last = stages.first * down, stages.last * up
    return Counts(stages.layers[0] * down + stages.layers[1] * up, first, down + up - first - last, last)


def _kept(stages: _Stages, moment: Moment, each: int) -> Counts:
    """Blocks are freed as a backward is done with its microbatch, what is beside them as it begins."""
    forwards, backwards, freed = moment
    per_rank = len(stages.layers)
    first = stages.first * (_at_turn(0, forwards, per_rank, each) - _at_turn(per_rank - 1, backwards, per_rank, each))
    last = stages.last * (_at_turn(per_rank - 1, forwards, per_rank, each) - _at_turn(0, backwards, per_rank, each))
    layers = _layers(stages.down, forwards, each) - _layers(stages.up, freed, each)
    return Counts(layers, first, forwards - backwards - first - last, last)


def _halves(stages: _Stages, moment: Moment, each: int) -> Counts:
    """The first stage goes backward once, for the weights, and makes nothing before."""
    _, backwards, freed = moment
    if backwards == freed:
        return NO_COUNTS
    per_rank = len(stages.layers)
    at_first, at_last = (
        _at_turn(turn, backwards, per_rank, each) - _at_turn(turn, freed, per_rank, each) for turn in (per_rank - 1, 0)
    )
    first, last = stages.first * at_first, stages.last * at_last
    layers = _layers(stages.up, backwards, each) - _layers(stages.up, freed, each) - first * stages.layers[0]
    return Counts(layers, first, backwards - freed - first - last, last)


def _adding(stages: _Stages, moment: Moment, each: int, done: int) -> Counts:
    """Of stages that have begun to add up gradients, without those that are done: these hold shards only."""
    per_rank = len(stages.layers)
    if not moment.freed:
        return NO_COUNTS
    begun = min(per_rank, -(-moment.freed // each))
    done = min(begun, done)
    first, last = int(begun == per_rank) * stages.first, int(done == 0 < begun) * stages.last
    return Counts(stages.up[begun] - stages.up[done], first, begun - done - first - last, last)


def _acting(stages: _Stages, moment: Moment, each: int) -> Counts:
    per_rank = len(stages.layers)
    stage = per_rank - 1 - moment.backwards // each % per_rank
    is_end = (stages.first and stage == 0) or (stages.last and stage == per_rank - 1)
    return NO_COUNTS if is_end or not stages.layers[stage] else ONE_MIDDLE


def _added_up(moment: Moment, each: int) -> Moment:
    """With only those backwards that another of the same stage has begun after; where backward isn't split, with all.

    What a stage's first backward gives waits for that. In a turn of as many as are between the parts of one backward,
    all have begun before the first is done.
    """
    behind = moment.backwards - moment.freed
    if not behind:
        return moment
    return moment._replace(freed=max(0, moment.freed - 1) if each > behind + 1 else 0)


def _at_turn(turn: int, actions: int, per_rank: int, each: int) -> int:
    """How many of a rank's first actions are of the stage with that turn, where a stage has ``each`` at a turn."""
    rounds, left = divmod(actions, per_rank * each)
    return rounds * each + min(each, max(0, left - turn * each))


def _layers(sums: Sequence[int], actions: int, each: int) -> int:
    """Of all stages together, each layer as often as it is gone through in a rank's first actions."""
    rounds, left = divmod(actions, (len(sums) - 1) * each)
    turns, rest = divmod(left, each)
    partly = rest * (sums[turns + 1] - sums[turns]) if rest else 0
    return rounds * each * sums[-1] + each * sums[turns] + partly
