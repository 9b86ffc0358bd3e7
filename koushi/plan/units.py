"""What data parallel gathers and frees together, and how large it is on one rank. No torch.

A unit is a block, an embedding on its own, or a stage's root: what is left of it. Sizes follow the placements
in the model's layout and ``torch.chunk`` along dim 0, with the padding that makes every rank's shard as large
as the first's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

from koushi.layout import Replicate, Shard, chunk
from koushi.models.llama import layout as llama
from koushi.models.llama.layout import EMBEDDING, OUTPUT, Parameter
from koushi.plan.workload import Transformer, Workload
from koushi.schedules import rank_of_stage, stages_of_rank

POSITIONS = "positions.weight"


@dataclass(frozen=True)
class Unit:
    """Element counts of one unit on one rank."""

    whole: int = 0
    """After tensor parallel's cut, before data parallel's."""
    padded: int = 0
    """The shards of all ranks together, padding included: what is gathered and what is scattered."""
    shard: int = 0
    """This rank's own, without padding."""
    copied: int = 0
    """Of ``shard``, what every tp rank holds alike, so that gradients are added up over tp."""
    tensors: tuple[int, ...] = ()
    """``whole`` by parameter."""
    shards: tuple[int, ...] = ()
    """``shard`` by parameter."""

    def __add__(self, other: Unit) -> Unit:
        return Unit(
            self.whole + other.whole,
            self.padded + other.padded,
            self.shard + other.shard,
            self.copied + other.copied,
            self.tensors + other.tensors,
            self.shards + other.shards,
        )


@dataclass(frozen=True)
class StageUnits:
    """The units of one pipeline stage; ``blocks`` of the kind ``block``."""

    embedding: Unit | None
    """None where the stage has no embedding, or where it belongs to the root."""
    block: Unit
    blocks: int
    root: Unit
    """Empty in the middle of a pipeline."""

    @cached_property
    def all(self) -> tuple[tuple[Unit, int], ...]:
        """Every kind of unit with how many there are, in the order of forward; empty ones left out."""
        ends = [(self.embedding, 1)] if self.embedding is not None else []
        units = (*ends, (self.block, self.blocks), (self.root, 1))
        return tuple((unit, count) for unit, count in units if unit.whole and count)

    @cached_property
    def total(self) -> Unit:
        """Element counts of the stage, without the parameters one by one."""
        parts = self.all
        return Unit(
            sum(unit.whole * count for unit, count in parts),
            sum(unit.padded * count for unit, count in parts),
            sum(unit.shard * count for unit, count in parts),
            sum(unit.copied * count for unit, count in parts),
        )


def _gpt_block(model: Transformer, tp: int) -> Iterator[Parameter]:
    """A block with the biases of GPT-2's, or two matrices in its feed-forward."""
    for parameter in llama.block_parameters(model, 0, tp):
        if not model.gated and parameter.name.endswith("w3.weight"):
            continue
        yield parameter
        norm = len(parameter.shape) == 1
        if (norm and model.layer_norm) or (not norm and model.biases):
            by_rows = Shard(0) if parameter.tp == Shard(0) else Replicate()
            yield replace(parameter, name=parameter.name + ".bias", shape=parameter.shape[:1], tp=by_rows)


def _unit(parameters: Iterable[Parameter], tp: int, degree: int, index: int) -> Unit:
    unit = Unit()
    for parameter in parameters:
        shape = [
            chunk(size, tp, 0)[1] if parameter.tp == Shard(axis) else size for axis, size in enumerate(parameter.shape)
        ]
        row = prod(shape[1:])
        start, stop = chunk(shape[0], degree, index)
        shard = (stop - start) * row
        unit += Unit(
            whole=shape[0] * row,
            padded=chunk(shape[0], degree, 0)[1] * degree * row,
            shard=shard,
            copied=shard if parameter.copied_over_tp else 0,
            tensors=(shape[0] * row,),
            shards=(shard,),
        )
    return unit


@cache
def block_unit(model: Transformer, tp: int, degree: int = 1, index: int = 0) -> Unit:
    """A block's, at ``index`` of ``degree`` shards."""
    return _unit(_gpt_block(model, tp), tp, degree, index)


@cache
def _ends(model: Transformer, tp: int, degree: int, index: int) -> tuple[Unit, Unit, Unit]:
    """Embedding, final norm, output projection."""
    ends = llama.parameters(replace(model, n_layers=0, tie_embeddings=False), tp)
    tables = [ends[EMBEDDING]]
    if model.learned_positions:
        tables.append(Parameter(POSITIONS, (model.learned_positions, model.dim), Replicate(), None))
    norms = [ends["norm.weight"]] * (2 if model.layer_norm else 1)
    return (
        _unit(tables, tp, degree, index),
        _unit(norms, tp, degree, index),
        _unit([ends[OUTPUT]], tp, degree, index),
    )


@cache
def stage_units(
    model: Transformer, tp: int, degree: int, index: int, blocks: int, first: bool, last: bool
) -> StageUnits:
    """The units of a stage of ``blocks`` blocks, at ``index`` of ``degree`` shards."""
    embedding, norm, output = _ends(model, tp, degree, index)
    block = block_unit(model.of_any_depth, tp, degree, index)
    if first and last and model.tie_embeddings:
        return StageUnits(None, block, blocks, embedding + norm)
    return StageUnits(embedding if first else None, block, blocks, norm + output if last else Unit())


def units_of(workload: Workload, stage: int, shard: int = 0) -> StageUnits:
    """The units of ``stage``, as the rank at index ``shard`` of dp_shard holds them."""
    degree = workload.mesh.degree("dp_shard") if workload.system.sharding == "fsdp" else 1
    return stage_units(
        workload.model.of_any_depth,
        workload.mesh.degree("tp"),
        degree,
        shard if degree > 1 else 0,
        workload.stage_layers[stage],
        stage == 0,
        stage == len(workload.stage_layers) - 1,
    )


def held_stages(workload: Workload, pp: int) -> tuple[int, ...]:
    """The stages of the rank at pipeline coordinate ``pp``, in the order of the model."""
    return stages_of_rank(workload.schedule, workload.mesh.degree("pp"), len(workload.stage_layers), pp)


def held_elsewhere(workload: Workload, stage: int, other: int) -> bool:
    """Whether ``other`` is a stage, and held by another rank than ``stage``."""
    n_stages, pp = len(workload.stage_layers), workload.mesh.degree("pp")
    if pp == 1 or not 0 <= other < n_stages:
        return False
    schedule = workload.schedule
    return rank_of_stage(schedule, pp, n_stages, stage) != rank_of_stage(schedule, pp, n_stages, other)
