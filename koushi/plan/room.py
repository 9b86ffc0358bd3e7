"""What layouts hold at least, without going through their schedules: a search's way to pass over what is too large.

A bound is what the fullest of a few ranks holds at moments that every step of the schedule has: as the
first backward begins, and as a later one begins while gradients are added up. What the action itself
makes comes on top in ``koushi.plan.memory``, which has the exact figure. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import mul
from typing import NamedTuple

from koushi.hardware.hardware import Hardware
from koushi.plan.allocator import fragmentation_bytes, runtime_bytes
from koushi.plan.layouts import Pipeline, Split, layers_of, mesh_of
from koushi.plan.operations import Device
from koushi.plan.pipelined import buffer_bytes, forward
from koushi.plan.stages import stage_of
from koushi.plan.units import units_of
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Recompute, Workload
from koushi.schedules import SCHEDULES, stages_of_rank
from koushi.traffic import DTYPE_BYTES


@dataclass(frozen=True)
class Moment:
    """What a rank has going on, by its stages."""

    kept: tuple[int, ...]
    """Microbatches kept for backward."""
    halves: tuple[int, ...]
    """Microbatches whose backward is half done: their blocks keep what they did."""
    whole: tuple[bool, ...]
    """Whether gradients are being added up."""


@cache
def moments(schedule: str, pp: int, per_rank: int, microbatches: int, rank: int) -> tuple[Moment, ...]:
    """Moments that ``rank`` goes through, or holds more at."""
    if SCHEDULES[schedule].v_shaped:
        return tuple(_v_shaped(schedule, pp, microbatches, rank))
    if schedule in ("GPipe", "LoopedBFS"):
        last = (*(False,) * (per_rank - 1), True)
        none = (0,) * per_rank
        first = Moment((microbatches,) * per_rank, none, (False,) * per_rank)
        if microbatches == 1:
            return (first,)
        return first, Moment((*(microbatches,) * (per_rank - 1), microbatches - 1), none, last)
    return tuple(_in_rounds(schedule, pp, per_rank, microbatches, rank))


def _in_rounds(schedule: str, pp: int, per_rank: int, microbatches: int, rank: int) -> Iterator[Moment]:
    """1F1B, which is one stage in one round, and its interleaved forms."""
    per_round = microbatches if per_rank == 1 else microbatches // max(1, microbatches // pp)
    ahead = pp - 1 - rank if schedule in ("1F1B", "InterleavedZeroBubble") else 2 * (pp - 1 - rank)
    every = per_rank * microbatches
    behind = rank if SCHEDULES[schedule].splits_backward else 0
    warmup = (per_rank - 1) * per_round + ahead if per_rank > 1 else ahead
    begun = (per_rank - 1) * per_round + 1
    for done in (0, begun):
        if done >= every:
            continue
        forwards = _counts(min(warmup + 1 + done, every), per_rank, per_round)
        backwards = tuple(reversed(_counts(done, per_rank, per_round)))
        freed = tuple(reversed(_counts(max(0, done - behind), per_rank, per_round)))
        # A stage whose last backward is done holds shards only.
        whole = tuple(0 < count < microbatches and gone > 0 for count, gone in zip(backwards, freed, strict=True))
        yield Moment(
            tuple(made - gone for made, gone in zip(forwards, backwards, strict=True)),
            tuple(half - gone for half, gone in zip(backwards, freed, strict=True)),
            whole,
        )


def _counts(actions: int, per_rank: int, per_round: int) -> tuple[int, ...]:
    """How many of a rank's first ``actions`` each stage has, where rounds go through all stages in turn."""
    rounds, left = divmod(actions, per_rank * per_round)
    return tuple(rounds * per_round + min(per_round, max(0, left - index * per_round)) for index in range(per_rank))


def _v_shaped(schedule: str, pp: int, microbatches: int, rank: int) -> Iterator[Moment]:
    down, up = min(microbatches, 2 * pp - rank - 1), min(microbatches, rank + 1)
    yield Moment((down, up), (0, 0), (False, False))
    if microbatches > 2 * pp:
        yield Moment((down, rank), (0, 0), (True, True))


@dataclass(frozen=True)
class _Kinds:
    """Bytes and elements of a stage with so many layers: a part of its own, and one for each layer."""

    kept: tuple[int, int, int, int]
    """Of a microbatch, for backward: a block; what the first, a middle and the last stage have besides."""
    whole: tuple[int, int, int, int]
    """Elements of parameters after tensor parallel's cut, in the same way."""
    buffers: tuple[int, int, int]
    """Of a microbatch's messages to come: of the first, a middle and the last stage."""


class _Sizes(NamedTuple):
    """What a rank's stages hold, in bytes; ``whole`` in elements."""

    kept: list[int]
    blocks: list[int]
    whole: list[int]
    states: float
    """Before data parallel cuts them."""
    always: float
    """Gathered parameters."""
    buffers: int
    """Of each microbatch's messages to come."""


class Room:
    """Bounds of memory for layouts of one run on one kind of hardware."""

    def __init__(self, base: Workload, hardware: Hardware):
        self.base = base
        self.hardware = hardware
        self.device: Device = "cpu" if hardware.name == "cpu" else "gpu"
        self._kinds: dict[tuple[object, ...], _Kinds] = {}
        self._held: dict[tuple[int, int, int, bool, int], _Sizes] = {}
        self._ranks: dict[tuple[Split, Recompute, Pipeline], tuple[tuple[float, float], ...]] = {}
        self._runtime: dict[tuple[bool, ...], int] = {}
        self._widths = tuple(DTYPE_BYTES[name] for name in (base.parameters, base.compute, base.reduce))

    def split_floor(self, split: Split, recompute: Recompute, dp_shard: int) -> float:
        """Of every pipeline: the states of a rank that holds an even share."""
        master = self._widths[0]
        block, first, _, last = self._kinds_of(split, recompute).whole
        even = (block * self.base.model.n_layers + first + last) / split.pp
        return self._device(split, 3 * master * even / dp_shard)

    def floor(self, split: Split, recompute: Recompute, pipeline: Pipeline, dp_shard: int) -> float:
        """Bytes that the fullest rank's device has taken at least."""
        key = (split, recompute, pipeline)
        ranks = self._ranks.get(key)
        if ranks is None:
            kinds = self._kinds_of(split, recompute)
            some = sorted({0, 1, split.pp - 1}) if split.pp > 1 else []
            found = [self._rank(split, kinds, pipeline, rank) for rank in some] or [self._alone(kinds)]
            ranks = self._ranks[key] = tuple(dict.fromkeys(found))
        return self._device(split, max(states / dp_shard + other for states, other in ranks))

    def _alone(self, kinds: _Kinds) -> tuple[float, float]:
        """As backward begins: states before data parallel cuts them, and what the whole model keeps of a microbatch."""
        layers, master = self.base.model.n_layers, self._widths[0]
        whole = kinds.whole[0] * layers + kinds.whole[1] + kinds.whole[3]
        kept = kinds.kept[0] * layers + kinds.kept[1] + kinds.kept[3] - kinds.kept[2]
        return 3.0 * master * whole, float(max(0, kept))

    def _rank(self, split: Split, kinds: _Kinds, pipeline: Pipeline, rank: int) -> tuple[float, float]:
        """States before data parallel cuts them, and what else a rank holds at its fullest moment."""
        v_shaped = SCHEDULES[pipeline.schedule].v_shaped
        sizes = self._sizes(split, kinds, pipeline.pp, pipeline.stages_per_rank, v_shaped, rank)
        gradient = self._widths[2] if split.data_parallel > 1 else self._widths[0]
        most = 0.0
        for moment in moments(pipeline.schedule, pipeline.pp, pipeline.stages_per_rank, split.microbatches, rank):
            there = sum(map(mul, moment.kept, sizes.kept)) + sum(map(mul, moment.halves, sizes.blocks))
            most = max(most, there + gradient * sum(map(mul, moment.whole, sizes.whole)))
        return sizes.states, sizes.always + sizes.buffers * split.microbatches + most

    def _sizes(self, split: Split, kinds: _Kinds, pp: int, per_rank: int, v_shaped: bool, rank: int) -> _Sizes:
        key = (id(kinds), pp, per_rank, v_shaped, rank)
        found = self._held.get(key)
        if found is None:
            n_stages = pp * per_rank
            held = stages_of_rank("ZBVZeroBubble" if v_shaped else "LoopedBFS", pp, n_stages, rank)
            layers = [layers_of(self.base.model.n_layers, n_stages)[stage] for stage in held]
            ends = [1 if stage == 0 else 3 if stage == n_stages - 1 else 2 for stage in held]
            whole = [kinds.whole[0] * count + kinds.whole[end] for count, end in zip(layers, ends, strict=True)]
            blocks = [kinds.kept[0] * count for count in layers]
            gathered = sum(sorted(whole)[-MOST_UNSHARDED:]) if split.data_parallel > 1 else 0
            found = self._held[key] = _Sizes(
                kept=[block + kinds.kept[end] for block, end in zip(blocks, ends, strict=True)],
                blocks=blocks,
                whole=whole,
                states=3.0 * self._widths[0] * sum(whole),
                always=float(gathered * self._widths[1]),
                buffers=sum(kinds.buffers[end - 1] for end in ends),
            )
        return found

    def _device(self, split: Split, active: float) -> float:
        return active + fragmentation_bytes(int(active), self.device) + self._runtime_of(split)

    def _runtime_of(self, split: Split) -> int:
        key = (split.tp > 1, split.pp > 1, split.data_parallel > 1)
        if key not in self._runtime:
            workload = replace(self.base, mesh=mesh_of(split.pp, 1, split.data_parallel, split.tp))
            self._runtime[key] = runtime_bytes(workload, self.device)
        return self._runtime[key]

    def _kinds_of(self, split: Split, recompute: Recompute) -> _Kinds:
        sharded = split.data_parallel > 1
        key = (split.tp, split.microbatch_size, recompute, sharded)
        found = self._kinds.get(key)
        if found is None:
            workload = replace(
                self.base,
                mesh=mesh_of(3, 1, 2 if sharded else 1, split.tp),
                stage_layers=(1, 2, 1),
                schedule="1F1B",
                microbatch_size=split.microbatch_size,
                microbatches=1,
                recompute=recompute,
            )
            stages = [stage_of(workload, index, self.device) for index in range(3)]
            one = stage_of(replace(workload, stage_layers=(1, 1, 1)), 1, self.device)
            sizes = [forward(stage).growth for stage in stages]
            buffers = [buffer_bytes(workload, stage) for stage in stages]
            block = sizes[1] - forward(one).growth
            wholes = [units_of(workload, index).total.whole for index in range(3)]
            per_block = wholes[1] // 2
            found = self._kinds[key] = _Kinds(
                (block, sizes[0] - block, sizes[1] - 2 * block, sizes[2] - block),
                (per_block, wholes[0] - per_block, 0, wholes[2] - per_block),
                (buffers[0], buffers[1], buffers[2]),
            )
        return found
