"""One pipeline stage as stretches of operations: all that data parallel's degrees do not change. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal

from koushi.hardware.hardware import Device
from koushi.plan.ends import EndShape, embedding_operations, logits_bytes, loss_operations, output_operations
from koushi.plan.lifetimes import Stretch, Weights
from koushi.plan.operations import BlockShape, Op, block_operations, block_shape, stream_sizes
from koushi.plan.spans import GRADIENTS, LOGITS, UNSHARDED_GRADIENTS
from koushi.plan.units import StageUnits, stage_units
from koushi.plan.workload import Recompute, System, Workload
from koushi.schedules import SCHEDULES
from koushi.traffic import DTYPE_BYTES

Holder = Literal["parameters", "fully_shard", "buffers"]
"""Where gradients of weights go as backward makes them: to the parameters; to ``fully_shard``, which reduces them; to
buffers of the whole step that other systems have."""


@dataclass(frozen=True)
class StageShape:
    """All that decides what a stage makes, keeps and frees."""

    ends: EndShape
    layers: int
    first: bool
    last: bool
    pipelined: bool
    splits: bool
    """Whether the schedule splits backward."""
    holder: Holder
    parameters: str
    reduce: str
    recompute: Recompute
    reshards: bool
    tied: bool
    keeps_output: bool
    """Whether a variable of the schedule's holds what the rank's last forward gave until the next one is through:
    torch's schedules of one stage a rank have such."""
    hands_on: bool
    """Whether the next stage is on the same rank and takes the output as it is."""
    system: System

    @property
    def block(self) -> BlockShape:
        return self.ends.block


@lru_cache(maxsize=4096)
def _common(workload: Workload, device: Device) -> StageShape:
    """The shape of every stage of ``workload`` but for what differs from stage to stage."""
    system, mesh = workload.system, workload.mesh
    holder: Holder = "buffers"
    if system.sharding == "fsdp" and not system.separate_masters:
        holder = "fully_shard" if mesh.degree("dp_replicate", "dp_shard") > 1 else "parameters"
    pipelined = mesh.degree("pp") > 1
    ends = EndShape(
        block_shape(workload, device),
        workload.model.vocab_size,
        workload.model.learned_positions,
        workload.parameters if holder == "parameters" else workload.compute,
        system.loss_parallel,
        system.loss_chunks,
        system.whole_logits,
        system.distributed_loss,
        system.compiled_loss,
        system.softmax_loss,
    )
    return StageShape(
        ends=ends,
        layers=0,
        first=False,
        last=False,
        pipelined=pipelined,
        splits=pipelined and splits_backward(workload),
        holder=holder,
        parameters=workload.parameters,
        reduce=workload.reduce,
        recompute=workload.recompute,
        reshards=workload.reshard_after_forward,
        tied=workload.model.tie_embeddings,
        keeps_output=pipelined and SCHEDULES[workload.schedule].most_stages_per_rank == 1,
        hands_on=False,
        system=system,
    )


def splits_backward(workload: Workload) -> bool:
    return SCHEDULES[workload.schedule].splits_backward


def stage_of(workload: Workload, index: int, device: Device) -> Stage:
    """The stage of ``workload`` at ``index``; the same object wherever nothing differs."""
    shape = _common(workload, device)
    n_stages = len(workload.stage_layers)
    return _stage(shape, workload.stage_layers[index], index == 0, index == n_stages - 1, index == turn(workload))


@lru_cache(maxsize=4096)
def _stage(shape: StageShape, layers: int, first: bool, last: bool, hands_on: bool) -> Stage:
    return Stage(replace(shape, layers=layers, first=first, last=last, hands_on=hands_on))


def turn(workload: Workload) -> int | None:
    """The stage whose next one is on the same rank: where a V turns."""
    pp = workload.mesh.degree("pp")
    return pp - 1 if pp > 1 and SCHEDULES[workload.schedule].v_shaped else None


class Stage:
    """A stage's stretches of operations. Made by ``stage_of``; remembers what it has worked out."""

    def __init__(self, shape: StageShape):
        self.shape = shape
        self.fsdp = shape.holder == "fully_shard"
        self.master = DTYPE_BYTES[shape.parameters]
        self.compute = DTYPE_BYTES[shape.block.compute]
        self.reduce = DTYPE_BYTES[shape.reduce]
        self.stream = stream_sizes(shape.block).stream
        """Bytes that go from stage to stage."""
        self.logits = logits_bytes(shape.ends)
        self._units: dict[int, StageUnits] = {}
        self._blocks: dict[bool, list[tuple[Stretch, int]]] = {}

    def units(self, shards: int) -> StageUnits:
        """The stage's units as the first of so many ``shards`` holds them."""
        if shards not in self._units:
            self._units[shards] = self._units_of(shards)
        return self._units[shards]

    def _units_of(self, shards: int) -> StageUnits:
        shape = self.shape
        model = replace(
            shape.block.model,
            vocab_size=shape.ends.vocab_size,
            learned_positions=shape.ends.learned_positions,
            tie_embeddings=shape.tied,
        )
        return stage_units(model, shape.block.tp, shards, 0, shape.layers, shape.first, shape.last)

    @cached_property
    def whole(self) -> int:
        """Elements of all parameters, after tensor parallel's cut."""
        return self.units(1).total.whole

    def copied(self, shards: int) -> int:
        """Bytes that a step ends with besides, as gradients of what every tp rank holds alike are added up in one flat
        tensor; other systems' buffers have them side by side."""
        if self.shape.holder == "buffers" or self.shape.block.tp == 1:
            return 0
        return self.units(shards if self.fsdp else 1).total.copied * self.master

    def _weights(self, stay: bool) -> Weights:
        shape = self.shape
        if shape.holder == "fully_shard":
            return Weights(UNSHARDED_GRADIENTS, self.compute, stay=stay)
        if shape.holder == "buffers":
            return Weights(UNSHARDED_GRADIENTS, self.compute, stay=not shape.system.gradients_at_once)
        return Weights(GRADIENTS, self.master, self.compute if self.compute != self.master else 0, stay)

    def _block(self, stay: bool, recompute: Recompute) -> Stretch:
        ops = block_operations(self.shape.block)
        stretch = Stretch(ops, self._weights(stay), self.stream, recompute=recompute)
        if recompute == "selective":
            stretch = replace(stretch, kept=_kept(ops, self.shape.system), skipped=_skipped(ops, self.shape.system))
        return replace(stretch, stops_early=self.shape.system.stops_early)

    def blocks(self, stay: bool) -> list[tuple[Stretch, int]]:
        """Kinds of blocks with how many there are: those that recompute, those that don't."""
        if stay not in self._blocks:
            self._blocks[stay] = self._blocks_of(stay)
        return self._blocks[stay]

    def _blocks_of(self, stay: bool) -> list[tuple[Stretch, int]]:
        recompute, count = self.shape.recompute, self.shape.layers
        again = count if recompute == "none" else round(count * self.shape.system.recompute_share)
        several: tuple[tuple[Recompute, int], ...] = ((recompute, again), ("none", count - again))
        return [(self._block(stay, mode), times) for mode, times in several if times]

    def embedding(self, stay: bool) -> Stretch:
        weights = replace(self._weights(stay), width=DTYPE_BYTES[self.shape.ends.table], cast=0)
        return Stretch(embedding_operations(self.shape.ends), weights)

    def output(self, stay: bool) -> Stretch:
        return Stretch(output_operations(self.shape.ends), self._weights(stay), self.stream)

    def loss(self) -> Stretch:
        # Pipeline stages hold their output until its backward is done.
        held = frozenset({"x"}) if self.shape.pipelined else frozenset()
        return Stretch(loss_operations(self.shape.ends), self._weights(True), self.logits, LOGITS, held=held)


def _kept(ops: tuple[Op, ...], system: System) -> frozenset[str]:
    """Attention, scatters, and every so many matmuls, the first of them; of these what backward needs, or all."""
    share = system.kept_matmuls
    matmuls = [op.makes for op in ops if op.kept and op.weight]
    some = [name for index, name in enumerate(matmuls, 1) if ceil(index * share) > ceil((index - 1) * share)]
    kept = frozenset(some) | {op.makes for op in ops if op.kept and not op.weight}
    if system.keeps_every_output:
        return kept
    names = [op.makes for op in ops]
    return kept - _skipped(ops, system) - set(names[names.index(matmuls[-1]) :])


def _skipped(ops: tuple[Op, ...], system: System) -> frozenset[str]:
    """What a scatter adds up: of all operations whose output is kept, these alone have neither a weight nor anything
    to save."""
    if system.keeps_every_output:
        return frozenset()
    return frozenset(name for op in ops if op.kept and not op.weight and not op.saves for name in op.reads)
