"""What layouts hold at least, without going through their schedules: a search's way to pass over what is too large.

A bound is what the fullest of a few ranks holds at moments that every step of the schedule has: as the
first backward begins, and as a later one begins while gradients are added up. What the action itself
makes comes on top in ``koushi.plan.memory``, which has the exact figure. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from koushi.hardware.hardware import Hardware
from koushi.plan.allocator import fragmentation_bytes, runtime_bytes
from koushi.plan.layouts import Layout, Pipeline, Split, layers_of, mesh_of
from koushi.plan.operations import Device
from koushi.plan.pipelined import buffer_bytes, forward
from koushi.plan.stages import stage_of
from koushi.plan.units import units_of
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Recompute, Workload
from koushi.schedules import SCHEDULES, stages_of_rank
from koushi.traffic import DTYPE_BYTES


class Moment(NamedTuple):
    """How far a rank has come; forwards go through its stages in rounds, backwards through the stages in reverse."""

    forwards: int
    backwards: int
    """Begun."""
    freed: int
    """Backwards that are done with their microbatch; fewer than have begun where backward is split."""


def per_round(schedule: str, pp: int, per_rank: int, microbatches: int) -> int:
    """Microbatches that go through one stage of a rank before the next stage has its turn."""
    if per_rank == 1 or schedule == "LoopedBFS":
        return microbatches
    return microbatches // max(1, microbatches // pp)


@cache
def moments(schedule: str, pp: int, per_rank: int, microbatches: int, rank: int) -> tuple[Moment, ...]:
    """As the first backward begins, and as a later one does when every stage has had one; not of V schedules."""
    every, each = per_rank * microbatches, per_round(schedule, pp, per_rank, microbatches)
    if schedule in ("GPipe", "LoopedBFS"):
        return tuple(Moment(every, done, done) for done in (0, 1) if done < every)
    ahead = pp - 1 - rank if schedule in ("1F1B", "InterleavedZeroBubble") else 2 * (pp - 1 - rank)
    warmup = (per_rank - 1) * each + ahead
    behind = rank if SCHEDULES[schedule].splits_backward else 0
    return tuple(
        Moment(min(warmup + 1 + done, every), done, max(0, done - behind))
        for done in (0, (per_rank - 1) * each + 1)
        if done < every
    )


@cache
def v_moments(pp: int, microbatches: int, rank: int) -> tuple[tuple[int, int, bool], ...]:
    """Of a V schedule: microbatches kept on the way down, and up; whether both stages' gradients are being added up."""
    down = min(microbatches, 2 * pp - rank - 1)
    found = (down, min(microbatches, rank + 1), False)
    return (found, (down, rank, True)) if microbatches > 2 * pp else (found,)


@dataclass(frozen=True)
class _Kinds:
    """Bytes and elements of a stage with so many layers: a part of its own, and one for each layer."""

    kept: tuple[int, int, int, int]
    """Of a microbatch, for backward: a block; what the first, a middle and the last stage have besides."""
    whole: tuple[int, int, int, int]
    """Elements of parameters after tensor parallel's cut, in the same way."""
    buffers: tuple[int, int, int]
    """Of a microbatch's messages to come: of the first, a middle and the last stage."""


class _Along(NamedTuple):
    """Sizes of a rank's stages in the order in which they have their turns, with their sums so far."""

    sizes: tuple[int, ...]
    sums: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> _Along:
        return cls(tuple(sizes), (0, *accumulate(sizes)))

    def after(self, actions: int, each: int) -> int:
        """The sizes of all actions so far, where a stage has ``each`` of them at a turn."""
        rounds, left = divmod(actions, len(self.sizes) * each)
        turns, rest = divmod(left, each)
        partly = rest * self.sizes[turns] if rest else 0
        return rounds * each * self.sums[-1] + each * self.sums[turns] + partly


class _Sizes(NamedTuple):
    """What a rank's stages hold, in bytes; ``whole`` in elements."""

    down: _Along
    """Kept of a microbatch, in the order of forward."""
    up: _Along
    """The same in the order of backward."""
    blocks: _Along
    """Of that what blocks keep."""
    whole: _Along
    """Parameters, in the order of backward."""
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
        self._ranks: dict[tuple[Split, Recompute, Pipeline, bool], tuple[tuple[float, float], ...]] = {}
        self._elements: dict[int, int] = {}
        self._runtime: dict[tuple[bool, ...], int] = {}
        self._widths = tuple(DTYPE_BYTES[name] for name in (base.parameters, base.compute, base.reduce))

    def split_floor(self, split: Split, dp_shard: int) -> float:
        """Of every pipeline: the states of a rank that holds an even share."""
        elements = self._elements.get(split.tp)
        if elements is None:
            workload = replace(self.base, mesh=mesh_of(3, 1, split.data_parallel, split.tp), stage_layers=(1, 1, 1))
            first, block, last = (units_of(workload, stage).total.whole for stage in range(3))
            ends = first - block if self.base.model.tie_embeddings else first + last - 2 * block
            elements = self._elements[split.tp] = block * self.base.model.n_layers + ends
        return self._device(split, 3 * self._widths[0] * elements / split.pp / dp_shard)

    def floor(self, split: Split, layout: Layout) -> float:
        """Bytes that the fullest rank's device has taken at least."""
        ranks = self._known(split, layout)
        return self._device(split, max(states / layout.dp_shard + other for states, other in ranks))

    def _known(self, split: Split, layout: Layout) -> tuple[tuple[float, float], ...]:
        key = (split, layout.recompute, layout.pipeline, layout.reshard_after_forward)
        found = self._ranks.get(key)
        if found is None:
            kinds = self._kinds_of(split, layout.recompute)
            if split.pp == 1:
                found = (self._alone(split, kinds, layout.reshard_after_forward),)
            else:
                found = self._some(split, kinds, layout)
            self._ranks[key] = found
        return found

    def _some(self, split: Split, kinds: _Kinds, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Of the ranks that are often the fullest, or as many as it takes to see that the layout is too large."""
        found = []
        for rank in (1, 0) if split.pp == 2 else (1, 0, split.pp - 1):
            states, other = self._rank(split, kinds, layout.pipeline, rank)
            found.append((states, other))
            if states / layout.dp_shard + other > self.hardware.chip.memory_bytes:
                break
        return tuple(found)

    def _alone(self, split: Split, kinds: _Kinds, reshards: bool) -> tuple[float, float]:
        """As backward begins: states before data parallel cuts them, and what the whole model keeps of a microbatch."""
        layers, master = self.base.model.n_layers, self._widths[0]
        output = 0 if self.base.model.tie_embeddings else kinds.whole[3]
        whole = kinds.whole[0] * layers + kinds.whole[1] + output
        kept = kinds.kept[0] * layers + kinds.kept[1] + kinds.kept[3] - kinds.kept[2]
        unsharded = 0 if reshards or split.data_parallel == 1 else whole * self._widths[1]
        return 3.0 * master * whole, float(unsharded + max(0, kept))

    def _rank(self, split: Split, kinds: _Kinds, pipeline: Pipeline, rank: int) -> tuple[float, float]:
        """States before data parallel cuts them, and what else a rank holds at its fullest moment."""
        pp, per_rank, count = pipeline.pp, pipeline.stages_per_rank, split.microbatches
        v_shaped = SCHEDULES[pipeline.schedule].v_shaped
        sizes = self._sizes(split, kinds, pp, per_rank, v_shaped, rank)
        gradient = self._widths[2] if split.data_parallel > 1 else self._widths[0]
        most = 0
        if v_shaped:
            for down, up, adding in v_moments(pp, count, rank):
                there = down * sizes.down.sizes[0] + up * sizes.down.sizes[1]
                most = max(most, there + (gradient * sizes.whole.sums[-1] if adding else 0))
            return sizes.states, sizes.always + sizes.buffers * count + most
        each = per_round(pipeline.schedule, pp, per_rank, count)
        for forwards, backwards, freed in moments(pipeline.schedule, pp, per_rank, count, rank):
            there = sizes.down.after(forwards, each) - sizes.up.after(backwards, each)
            there += sizes.blocks.after(backwards, each) - sizes.blocks.after(freed, each)
            if freed:
                # A stage whose last backward is done holds shards only.
                begun = min(per_rank, -(-freed // each))
                done = backwards // each if each == count else 0
                there += gradient * max(0, sizes.whole.sums[begun] - sizes.whole.sums[done])
            most = max(most, there)
        return sizes.states, sizes.always + sizes.buffers * count + most

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
            kept = [block + kinds.kept[end] for block, end in zip(blocks, ends, strict=True)]
            gathered = sum(sorted(whole)[-MOST_UNSHARDED:]) if split.data_parallel > 1 else 0
            found = self._held[key] = _Sizes(
                down=_Along.of(kept),
                up=_Along.of(kept[::-1]),
                blocks=_Along.of(blocks[::-1]),
                whole=_Along.of(whole[::-1]),
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
