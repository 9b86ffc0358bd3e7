"""Every collective of one training step, as a rank takes part in it. No torch.

For Koushi's own ways this is what its code does, to the byte and the call: ``parallel/tensor.py`` and
``parallel/recompute.py`` on tp, torch's ``fully_shard`` on dp_shard and dp_replicate, torch's pipeline stages on
pp, ``train/step.py`` and ``parallel/gradients.py`` for what is summed once a step. Other systems' ways follow
Megatron-LM (arXiv 1909.08053, 2104.04473, 2205.05198) and ZeRO (arXiv 1910.02054).

Letters: N tokens of a microbatch, D dim, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from koushi.mesh import MeshSpec
from koushi.plan.units import StageUnits, Unit, held_elsewhere, held_stages, units_of
from koushi.plan.unshard import unshards
from koushi.plan.workload import Workload
from koushi.schedules import tied_ends
from koushi.traffic import DTYPE_BYTES, Collective, Operation, Phase, Traffic

Calls = tuple[tuple[Collective, int], ...]


@dataclass(frozen=True)
class Pieces:
    """What one stage's parts send; times how often each happens, they make a step."""

    block_forward: Traffic
    """Of one block for one microbatch, on tp."""
    block_backward: Traffic
    """With what recompute does again."""
    embedding_forward: Traffic
    embedding_backward: Traffic
    output_forward: Traffic
    """The output projection's, and the loss's."""
    output_backward: Traffic
    receive_forward: Traffic
    """A microbatch's activations from the stage before; empty where that is on the same rank."""
    send_forward: Traffic
    receive_backward: Traffic
    send_backward: Traffic
    units: StageUnits
    gathers: Mapping[Phase, int]
    """How often a block is gathered in a step."""
    root_gathers: int
    reductions: int
    """How often a unit's gradients are scattered in a step."""


def pieces(workload: Workload, stage: int) -> Pieces:
    """The parts of one pipeline stage, first stage 0."""
    moved = _transfers(workload, stage)
    gathers, root_gathers, reductions = _counts(workload, stage)
    return Pieces(
        block_forward=Counter(_block_forward(workload)),
        block_backward=Counter(_block_backward(workload)),
        embedding_forward=Counter(_embedding(workload, "forward")),
        embedding_backward=Counter(_embedding(workload, "backward")),
        output_forward=Counter(_output_forward(workload)),
        output_backward=Counter(_output_backward(workload)),
        receive_forward=Counter(moved["recv", "forward"]),
        send_forward=Counter(moved["send", "forward"]),
        receive_backward=Counter(moved["recv", "backward"]),
        send_backward=Counter(moved["send", "backward"]),
        units=units_of(workload, stage),
        gathers=gathers,
        root_gathers=root_gathers,
        reductions=reductions,
    )


def traffic(workload: Workload, pp: int, shard: int = 0) -> Traffic:
    """Every collective of one step by the rank at pipeline coordinate ``pp``.

    ``shard`` is its index along dp_shard: shards of unequal size make a difference to the gradients that are
    summed over tp and between the ends of a tied embedding.
    """
    total: Traffic = Counter(start_of_step(workload))
    for stage in held_stages(workload, pp):
        for calls, times in _stage_calls(workload, stage):
            for collective, count in calls.items():
                total[collective] += count * times
    total.update(end_of_step(workload, pp, shard))
    return total


def _stage_calls(workload: Workload, stage: int) -> list[tuple[Traffic, int]]:
    part, microbatches = pieces(workload, stage), workload.microbatches
    blocks = part.units.blocks
    found = [
        (part.block_forward, blocks * microbatches),
        (part.block_backward, blocks * microbatches),
        (part.receive_forward, microbatches),
        (part.send_forward, microbatches),
        (part.receive_backward, microbatches),
        (part.send_backward, microbatches),
    ]
    if stage == 0:
        found += [(part.embedding_forward, microbatches), (part.embedding_backward, microbatches)]
    if stage == len(workload.stage_layers) - 1:
        found += [(part.output_forward, microbatches), (part.output_backward, microbatches)]
    for unit, count in part.units.all:
        if unit is part.units.root:
            found.append((unshard(workload, unit, "forward"), part.root_gathers))
        else:
            found += [(unshard(workload, unit, phase), count * times) for phase, times in part.gathers.items()]
        found.append((reduction(workload, unit), count * part.reductions))
        found.append((replicas(workload, unit), count))
    return found


# Tensor parallel.


def _activations(workload: Workload) -> int:
    """Bytes of a microbatch's activations over its whole sequence, N x D."""
    tokens = workload.microbatch_size * workload.seq_len
    return tokens * workload.model.dim * DTYPE_BYTES[workload.compute]


def _on_tp(workload: Workload, operation: Operation, phase: Phase, size: int | None = None) -> Collective:
    return Collective("tp", operation, phase, workload.compute, _activations(workload) if size is None else size)


def _block_forward(workload: Workload) -> dict[Collective, int]:
    """Attention and feed-forward each gather their input and scatter their sum (arXiv 2205.05198, figure 5)."""
    if workload.mesh.degree("tp") == 1:
        return {}
    if not workload.system.sequence_parallel:
        return {_on_tp(workload, "all_reduce", "forward"): 2}
    return {_on_tp(workload, "all_gather", "forward"): 2, _on_tp(workload, "reduce_scatter", "forward"): 2}


def _block_backward(workload: Workload) -> dict[Collective, int]:
    """Each collective's counterpart, and what is done again.

    Full recompute stops at the last tensor that backward needs, the input of w2: without the last scatter.
    Selective recompute keeps what was scattered and gathers again.
    """
    system = workload.system
    if workload.mesh.degree("tp") == 1:
        return {}
    full = workload.recompute == "full"
    if not system.sequence_parallel:
        return {_on_tp(workload, "all_reduce", "backward"): 4 if full else 2}
    gathered_again = 2 if system.keeps_gathered and workload.recompute != "none" else 0
    if not system.keeps_gathered and not system.gathers_beside:
        gathered_again = 4 if full else 2
    return {
        _on_tp(workload, "all_gather", "backward"): 2 + gathered_again,
        _on_tp(workload, "reduce_scatter", "backward"): 2 + (1 if full else 0),
    }


def _embedding(workload: Workload, phase: Phase) -> dict[Collective, int]:
    """A table cut by vocabulary gives partial sums."""
    if workload.mesh.degree("tp") == 1:
        return {}
    if not workload.system.sequence_parallel:
        return {_on_tp(workload, "all_reduce", phase): 1} if phase == "forward" else {}
    return {_on_tp(workload, "reduce_scatter" if phase == "forward" else "all_gather", phase): 1}


def _output_forward(workload: Workload) -> dict[Collective, int]:
    """The gathered input; then either the loss's maximum and two sums per token, or whole logits."""
    if workload.mesh.degree("tp") == 1:
        return {}
    found: dict[Collective, int] = {}
    if workload.system.sequence_parallel:
        found[_on_tp(workload, "all_gather", "forward")] = 1
    tokens = workload.microbatch_size * workload.seq_len
    if workload.system.loss_parallel:
        wide = "float64" if workload.compute == "float64" else "float32"
        size = tokens * DTYPE_BYTES[wide]
        found[Collective("tp", "all_reduce", "forward", wide, size)] = 1
        found[Collective("tp", "all_reduce", "forward", wide, 2 * size)] = 1
    else:
        logits = tokens * workload.model.vocab_size * DTYPE_BYTES[workload.compute]
        found[_on_tp(workload, "all_gather", "forward", logits)] = 1
    return found


def _output_backward(workload: Workload) -> dict[Collective, int]:
    if workload.mesh.degree("tp") == 1:
        return {}
    return {_on_tp(workload, "reduce_scatter" if workload.system.sequence_parallel else "all_reduce", "backward"): 1}


# Data parallel.


def _counts(workload: Workload, stage: int) -> tuple[dict[Phase, int], int, int]:
    """How often a block is gathered, by phase; how often the root is; how often gradients are scattered.

    torch's ``fully_shard``: without pipelining, in each microbatch's forward, again in its backward where
    parameters were freed in between, and gradients are scattered every time. The root is never freed in between.
    Under pipelining gradients are scattered once, after the stage's last backward.
    """
    if workload.system.sharding != "fsdp":
        return {}, 0, 1
    if workload.mesh.degree("pp") > 1:
        gathered = unshards(workload, stage)
        return {"forward": gathered}, gathered, 1
    again = workload.microbatches if workload.reshard_after_forward else 0
    return {"forward": workload.microbatches, "backward": again}, workload.microbatches, workload.microbatches


def unshard(workload: Workload, unit: Unit, phase: Phase) -> Traffic:
    """The gather of one unit's parameters: nothing in a group of one."""
    if workload.mesh.degree("dp_shard") == 1 or workload.system.sharding != "fsdp":
        return Counter()
    float8 = workload.system.gathers_float8 and unit.tensors == units_of(workload, 0).block.tensors
    dtype = "float8" if float8 else workload.compute
    return Counter({Collective("dp_shard", "all_gather", phase, dtype, unit.padded * DTYPE_BYTES[dtype]): 1})


def reduction(workload: Workload, unit: Unit) -> Traffic:
    """The scatter of one unit's gradients, once."""
    if workload.mesh.degree("dp_shard") == 1 or workload.system.sharding != "fsdp":
        return Counter()
    size = unit.padded * DTYPE_BYTES[workload.reduce]
    return Counter({Collective("dp_shard", "reduce_scatter", "backward", workload.reduce, size): 1})


def replicas(workload: Workload, unit: Unit) -> Traffic:
    """What one unit's gradients cost once a step besides: an all-reduce of the shard over the replicas, or ZeRO-1's."""
    system, mesh = workload.system, workload.mesh
    if system.sharding == "fsdp":
        degree = mesh.degree("dp_replicate")
        if degree == 1:
            return Counter()
        size = unit.padded // mesh.degree("dp_shard") * DTYPE_BYTES[workload.reduce]
        return Counter({Collective("dp_replicate", "all_reduce", "backward", workload.reduce, size): 1})
    dims, owners = _fold(mesh, ("dp_replicate", "dp_shard")), _fold(mesh, workload.owners)
    if not dims:
        return Counter()
    gradients = unit.whole * DTYPE_BYTES[workload.reduce]
    summed: Operation = "reduce_scatter" if owners and not system.hybrid else "all_reduce"
    found = Counter({Collective(dims, summed, "backward", workload.reduce, gradients): 1})
    if owners:
        parameters = unit.whole * DTYPE_BYTES[workload.compute]
        found[Collective(owners, "all_gather", "optimizer", workload.compute, parameters)] = 1
    return found


def _fold(mesh: MeshSpec, names: Iterable[str]) -> str:
    """The dims of ``names`` that have more than one rank, joined; empty where none has."""
    return ",".join(name for name in names if mesh.degree(name) > 1)


# Pipeline parallel.


def _transfers(workload: Workload, stage: int) -> dict[tuple[Operation, Phase], dict[Collective, int]]:
    """A microbatch's messages to and from the neighbouring stages, unless the same rank holds them."""
    found: dict[tuple[Operation, Phase], dict[Collective, int]] = {
        ("recv", "forward"): {},
        ("send", "forward"): {},
        ("recv", "backward"): {},
        ("send", "backward"): {},
    }
    size = _activations(workload) // pieces_sent(workload)

    def message(operation: Operation, phase: Phase) -> None:
        found[operation, phase] = {Collective("pp", operation, phase, workload.compute, size): 1}
        if operation == "recv" and gathers_received(workload):
            found[operation, phase][_on_tp(workload, "all_gather", phase)] = 1

    if held_elsewhere(workload, stage, stage - 1):
        message("recv", "forward")
        message("send", "backward")
    if held_elsewhere(workload, stage, stage + 1):
        message("send", "forward")
        message("recv", "backward")
    return found


def pieces_sent(workload: Workload) -> int:
    """Ranks of tp that send a message between stages together, each a piece of it."""
    cut = workload.system.sequence_parallel or workload.system.cut_sends
    return workload.mesh.degree("tp") if cut else 1


def gathers_received(workload: Workload) -> bool:
    """Whether the pieces are made whole again on arrival."""
    return pieces_sent(workload) > 1 and not workload.system.sequence_parallel


# Once a step.


@cache
def _dims(workload: Workload) -> tuple[str, ...]:
    return tuple(name for name in ("dp_replicate", "dp_shard", "tp", "pp") if workload.mesh.degree(name) > 1)


def start_of_step(workload: Workload) -> Traffic:
    """The count of valid tokens, summed over all that read different samples."""
    return Counter(
        {
            Collective(name, "all_reduce", "start", "int64", DTYPE_BYTES["int64"]): 1
            for name in _dims(workload)
            if name in ("dp_replicate", "dp_shard")
        }
    )


def end_of_step(workload: Workload, pp: int, shard: int = 0) -> Traffic:
    """Gradients that lie in several places, then the loss and the squared norm."""
    total: Traffic = Counter()
    size = DTYPE_BYTES[workload.parameters]
    stages = [units_of(workload, stage, shard) for stage in held_stages(workload, pp)]
    copied = sum(units.total.copied for units in stages) * size
    if workload.mesh.degree("tp") > 1 and copied:
        total[Collective("tp", "all_reduce", "optimizer", workload.parameters, copied)] += 1
    if exchanges_table(workload, pp):
        exchanged = table_shard(workload, shard) * size
        for operation in ("send", "recv"):
            total[Collective("pp", operation, "optimizer", workload.parameters, exchanged)] += 1
    for name in _dims(workload):
        # The loss is the same over tp already, the squared norm over dp_replicate.
        scalars = 1 if name in ("dp_replicate", "tp") else 2
        total[Collective(name, "all_reduce", "optimizer", workload.parameters, scalars * size)] += 1
    return total


def exchanges_table(workload: Workload, pp: int) -> bool:
    """Whether the rank at ``pp`` has one of a tied embedding's two copies, and another rank the other."""
    shape = (workload.schedule, workload.mesh.degree("pp"), len(workload.stage_layers))
    ends = tied_ends(*shape, tied=workload.model.tie_embeddings)
    return ends is not None and ends[0] != ends[1] and pp in ends


def table_shard(workload: Workload, shard: int = 0) -> int:
    """Elements of the first stage's embedding at index ``shard`` of dp_shard."""
    table = units_of(workload, 0, shard).embedding
    assert table is not None, "the first of several stages has an embedding of its own"
    return table.shards[0]
