"""What layouts hold at least, without going through their schedules: a search's way to pass over what is too large.

A bound is what the fullest of a few ranks holds at moments that every step of the schedule has: as the
first backward begins, and as a later one begins while gradients are added up. What the action itself
makes comes on top in ``koushi.plan.memory``, which has the exact figure. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from koushi.hardware.hardware import Device, Hardware
from koushi.plan.allocator import fragmentation_bytes, runtime_bytes
from koushi.plan.layouts import Layout, Pipeline, Split, mesh_of
from koushi.plan.moments import Counts, Family, fewest_in_flight, fewest_layers, share
from koushi.plan.pipelined import backward, buffer_bytes, forward
from koushi.plan.stages import Stage, stage_of
from koushi.plan.units import units_of
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.plan.workload import Recompute, Workload
from koushi.schedules import SCHEDULES
from koushi.traffic import DTYPE_BYTES


@dataclass(frozen=True)
class _Kinds:
    """Bytes and elements of a stage with so many layers: a part of its own, and one for each layer."""

    kept: tuple[int, int, int, int]
    """Of a microbatch, for backward: a block; what the first, a middle and the last stage have besides."""
    whole: tuple[int, int, int, int]
    """Elements of parameters after tensor parallel's cut, in the same way."""
    buffers: tuple[int, int, int]
    """Of a microbatch's messages to come: of the first, a middle and the last stage."""


@dataclass(frozen=True)
class _Backwards:
    """What backwards make of stages as in ``_Kinds``; most of what is too large is seen to be without."""

    half: tuple[int, int, int, int]
    """What there is besides once the first half of a split backward is done, with all that a stage keeps beside its
    blocks; the first stage has no such half."""
    acts: tuple[int, int]
    """What a middle stage's backward makes at least: a whole one, the first half of a split one."""


class Room:
    """Bounds of memory for layouts of one run on one kind of hardware."""

    def __init__(self, base: Workload, hardware: Hardware):
        self.base = base
        self.hardware = hardware
        self.device: Device = hardware.device
        self._kinds: dict[tuple[object, ...], _Kinds] = {}
        self._backwards: dict[tuple[object, ...], _Backwards] = {}
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

    def family_floor(self, split: Split, recompute: Recompute, family: Family) -> float:
        """Of every pipeline of a family, however sharded: what the second rank holds as its first backward begins.

        Where stages take turns, every layer has had as many forwards then, whatever the number of virtual stages, and
        the rank has an even share of the layers. Pipelines of V schedules are all alike at that moment.
        """
        kinds, layers = self._kinds_of(split, recompute), self.base.model.n_layers
        if split.pp == 1:
            states, other = self._alone(split, kinds, reshards=True)
        elif family == "v-shaped":
            states, other = self._rank(split, recompute, Pipeline(split.pp, "ZBVZeroBubble", 2), 1)
        else:
            held = fewest_layers(layers, split.pp)
            gathered = min(held, MOST_UNSHARDED) * kinds.whole[0] if split.data_parallel > 1 else 0
            other = float(gathered * self._widths[1]) + min(kinds.buffers[1:]) * split.microbatches
            other += fewest_in_flight(family, split.pp, split.microbatches) * held * kinds.kept[0]
            states = 3.0 * self._widths[0] * kinds.whole[0] * held
        return self._device(split, states / split.data_parallel + other)

    def floor(self, split: Split, layout: Layout) -> float:
        """Bytes that the fullest rank's device has taken at least."""
        ranks, gathering = self._known(split, layout), 0
        if split.pp > 1 and layout.dp_shard > 1 and self.base.system.own_streams and self.device == "gpu":
            # The pool for gathers is full at some moment, and what it has stays reserved.
            gathering = 2 * self._widths[1] * self._kinds_of(split, layout.recompute).whole[0]
        return self._device(split, max(states / layout.dp_shard + other for states, other in ranks) + gathering)

    def _known(self, split: Split, layout: Layout) -> tuple[tuple[float, float], ...]:
        key = (split, layout.recompute, layout.pipeline, layout.reshard_after_forward)
        found = self._ranks.get(key)
        if found is None:
            if split.pp == 1:
                kinds = self._kinds_of(split, layout.recompute)
                found = (self._alone(split, kinds, layout.reshard_after_forward),)
            else:
                found = self._some(split, layout)
            self._ranks[key] = found
        return found

    def _some(self, split: Split, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Of the ranks that are often the fullest, or as many as it takes to see that the layout is too large."""
        found = []
        late = (split.pp - 2,) if SCHEDULES[layout.pipeline.schedule].splits_backward else ()
        for rank in dict.fromkeys((1, *late, split.pp - 1, 0)):
            states, other = self._rank(split, layout.recompute, layout.pipeline, rank)
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

    def _rank(self, split: Split, recompute: Recompute, pipeline: Pipeline, rank: int) -> tuple[float, float]:
        """States before data parallel cuts them, and what else a rank holds at its fullest moment."""
        kinds = self._kinds_of(split, recompute)
        held = share(self.base.model.n_layers, pipeline, split.microbatches, rank)
        stages, gradient, shared = held.stages, self._widths[0], split.data_parallel > 1
        if shared:
            gradient = self._widths[2]
        first, middle, last = kinds.buffers
        buffers = stages.first * first + stages.middle * middle + stages.last * last
        # A sum is there in the reduction's dtype, what waits to be added in that of compute.
        splits = SCHEDULES[pipeline.schedule].splits_backward
        late = min(gradient, self._widths[1]) if splits else gradient
        most = 0
        gathering: tuple[Counts, ...] = ()
        gathered = 0
        for kept, halves, begun, summed, acting, there_is in held.moments:
            there = kept.of(kinds.kept) + late * begun.of(kinds.whole) + (gradient - late) * summed.of(kinds.whole)
            if any(halves) or acting.middle:
                backwards = self._backwards_of(split, recompute)
                there += halves.of(backwards.half) + acting.middle * backwards.acts[splits]
            if shared and there_is is not gathering:
                gathering = there_is
                gathered = sum(sorted(one.of(kinds.whole) for one in gathering)[-MOST_UNSHARDED:])
            most = max(most, there + gathered * self._widths[1])
        states = 3.0 * self._widths[0] * stages.of(kinds.whole)
        return states, float(buffers * split.microbatches + most)

    def _device(self, split: Split, active: float) -> float:
        unused = fragmentation_bytes(int(active), self.device, self.base.system.expandable_segments)
        return active + unused + self._runtime_of(split)

    def _runtime_of(self, split: Split) -> int:
        key = (split.tp > 1, split.pp > 1, split.data_parallel > 1)
        if key not in self._runtime:
            workload = replace(self.base, mesh=mesh_of(split.pp, 1, split.data_parallel, split.tp))
            self._runtime[key] = runtime_bytes(workload, self.device)
        return self._runtime[key]

    def _kinds_of(self, split: Split, recompute: Recompute) -> _Kinds:
        key = _key(split, recompute)
        found = self._kinds.get(key)
        if found is None:
            workload = self._of_three(split, recompute)
            stages = [stage_of(workload, index, self.device) for index in range(3)]
            first, middle, last = (forward(stage).growth for stage in stages)
            block = middle - forward(self._one_block(workload)).growth
            buffers = [buffer_bytes(workload, stage) for stage in stages]
            wholes = [units_of(workload, index).total.whole for index in range(3)]
            per_block = wholes[1] // 2
            found = self._kinds[key] = _Kinds(
                (block, first - block, middle - 2 * block, last - block),
                (per_block, wholes[0] - per_block, 0, wholes[2] - per_block),
                (buffers[0], buffers[1], buffers[2]),
            )
        return found

    def _backwards_of(self, split: Split, recompute: Recompute) -> _Backwards:
        key = _key(split, recompute)
        found = self._backwards.get(key)
        if found is None:
            workload = self._of_three(split, recompute)
            halved = replace(workload, schedule="InterleavedZeroBubble")
            one, alone = self._one_block(workload), self._one_block(halved)
            middle, last = (
                backward(stage_of(halved, index, self.device), False, half="inputs").growth for index in (1, 2)
            )
            more = middle - backward(alone, False, half="inputs").growth
            # Of one block, without the buffers of what comes and goes: with more blocks these may be there later.
            # Least is made where gradients go to a sum that is there.
            acts = [
                backward(one, False).highest - 2 * one.stream,
                backward(alone, False, late=True, half="inputs").highest - 2 * one.stream,
            ]
            _, *beside = self._kinds_of(split, recompute).kept
            found = self._backwards[key] = _Backwards(
                (more, beside[0], beside[1] + middle - 2 * more, beside[2] + last - more),
                (max(0, acts[0]), max(0, acts[1])),
            )
        return found

    def _of_three(self, split: Split, recompute: Recompute) -> Workload:
        """Three stages, the one in the middle of two blocks."""
        return replace(
            self.base,
            mesh=mesh_of(3, 1, 2 if split.data_parallel > 1 else 1, split.tp),
            stage_layers=(1, 2, 1),
            schedule="1F1B",
            microbatch_size=split.microbatch_size,
            microbatches=1,
            recompute=recompute,
        )

    def _one_block(self, workload: Workload) -> Stage:
        """The stage in the middle, of one block."""
        return stage_of(replace(workload, stage_layers=(1, 1, 1)), 1, self.device)


def _key(split: Split, recompute: Recompute) -> tuple[object, ...]:
    """What the kinds of a split depend on."""
    return split.tp, split.microbatch_size, recompute, split.data_parallel > 1
