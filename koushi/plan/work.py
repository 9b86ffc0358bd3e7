"""Seconds of a rank's work on one microbatch: a block's, and those of both ends of the model. No torch.

Letters: N tokens of a microbatch that the rank computes with inside a tensor-parallel region, D dim, F ffn_dim,
H query heads x head_dim, K kv heads x head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from koushi.hardware.collective import collective_seconds, span
from koushi.hardware.hardware import Hardware
from koushi.hardware.matmul import attention_seconds, matmul_seconds, streaming_seconds
from koushi.mesh import MeshSpec
from koushi.plan.communication import pieces
from koushi.plan.workload import Transformer, Workload
from koushi.traffic import DTYPE_BYTES, Traffic


@dataclass(frozen=True)
class Work:
    """Seconds, by what they go to; ``host`` runs beside the others."""

    ideal: float = 0.0
    """What the model's matmuls and attention would take at the chip's peak, the causal half of attention left out."""
    matmul: float = 0.0
    """Of matmuls beyond that."""
    attention: float = 0.0
    """Of attention beyond that."""
    memory: float = 0.0
    """Of what only moves bytes."""
    communication: float = 0.0
    """Tensor parallel's and context parallel's, exposed."""
    host: float = 0.0
    """What the processor takes to issue all of it."""

    @property
    def device(self) -> float:
        return self.ideal + self.matmul + self.attention + self.memory + self.communication

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.device, self.host)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.ideal + other.ideal,
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory + other.memory,
            self.communication + other.communication,
            self.host + other.host,
        )

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, each.name) * times for each in fields(self)))


@dataclass(frozen=True)
class Phases:
    """Work of one microbatch, forward and backward; recompute's share of backward apart."""

    forward: Work
    inputs: Work
    weights: Work
    again: Work
    """What is computed a second time; its ideal is 0, since it is no part of the model's arithmetic."""

    @property
    def backward(self) -> Work:
        return self.again + self.inputs + self.weights


def key_of(workload: Workload) -> Workload:
    """The workload reduced to what a microbatch's work depends on, to remember it by."""
    mesh = workload.mesh
    return replace(
        workload,
        model=replace(workload.model, n_layers=1),
        mesh=MeshSpec.of(tp=mesh.degree("tp"), cp=mesh.degree("cp")),
        stage_layers=(1,),
        schedule="1F1B",
        microbatches=1,
        reshard_after_forward=True,
    )


Linear = tuple[int, int]
"""Inputs and outputs of a projection, of this rank."""


def _linears(model: Transformer, tp: int, fused: bool) -> Iterator[Linear]:
    q, kv = model.n_heads * model.head_dim // tp, max(model.head_dim, model.n_kv_heads * model.head_dim // tp)
    ffn = model.ffn_dim // tp
    yield from [(model.dim, q + 2 * kv)] if fused else [(model.dim, q), (model.dim, kv), (model.dim, kv)]
    yield q, model.dim
    if model.gated:
        yield from [(model.dim, 2 * ffn)] if fused else [(model.dim, ffn), (model.dim, ffn)]
    else:
        yield model.dim, ffn
    yield ffn, model.dim


def _matmul_dtype(workload: Workload) -> str:
    return "float8" if workload.system.float8 else workload.compute


def _dense(hardware: Hardware, workload: Workload, tokens: int, linear: Linear, transposed: str = "") -> Work:
    """One matmul of a projection: forward, or the gradient of its ``inputs`` or its ``weights``."""
    inputs, outputs = linear
    shape = {"": (tokens, outputs, inputs), "inputs": (tokens, inputs, outputs), "weights": (outputs, inputs, tokens)}
    dtype = _matmul_dtype(workload)
    seconds = matmul_seconds(hardware.chip, *shape[transposed], dtype)
    ideal = 2.0 * tokens * inputs * outputs / hardware.chip.peak(workload.compute)
    return Work(ideal=ideal, matmul=seconds - ideal)


def _attention(hardware: Hardware, workload: Workload, backward: bool) -> Work:
    model, tp, cp = workload.model, workload.mesh.degree("tp"), workload.mesh.degree("cp")
    chip, heads, length = hardware.chip, max(1, model.n_heads // tp), workload.seq_len
    batch, dtype = workload.microbatch_size, workload.compute
    passes = 2.5 if backward else 1.0
    ideal = 2.0 * passes * batch * heads * length * (length // cp) * model.head_dim / chip.peak(dtype)
    if workload.system.flash_attention:
        seconds = attention_seconds(chip, batch, heads, length // cp, length, model.head_dim, dtype, backward)
        return Work(ideal=ideal, attention=seconds - ideal)
    products = matmul_seconds(chip, length // cp, length, model.head_dim, dtype, batch * heads)
    products += matmul_seconds(chip, length // cp, model.head_dim, length, dtype, batch * heads)
    # Scores are written, read and written by a fused softmax, and read.
    scores = batch * heads * length * (length // cp) * DTYPE_BYTES[dtype]
    moved = scores * (8 if backward else 4)
    seconds = products * (2 if backward else 1) + streaming_seconds(chip, moved, 2)
    return Work(ideal=ideal, attention=seconds - ideal)


def _elementwise(hardware: Hardware, workload: Workload) -> tuple[Work, Work]:
    """Of a block's forward and backward: norms, rotation, activation, residual sums.

    Passes count reads and writes of a value. Fused: what the arithmetic needs at least. Else every operation
    reads and writes on its own.
    """
    model, tp, cp = workload.model, workload.mesh.degree("tp"), workload.mesh.degree("cp")
    fused, size = workload.system.fused, DTYPE_BYTES[workload.compute]
    tokens = workload.microbatch_size * workload.seq_len // cp
    narrow = tokens * model.dim // (tp if workload.system.sequence_parallel else 1)
    rotated = tokens * (model.n_heads + model.n_kv_heads) * model.head_dim // tp
    wide = tokens * model.ffn_dim // tp
    norms = 2 * (2 if fused else 3)
    residual = 2 * (2 if fused else 3)
    rotation = 0 if model.learned_positions else (2 if fused else 10)
    activation = (3 if fused else 5) if model.gated else (2 if fused else 3)
    moved = size * (narrow * (norms + residual) + rotated * rotation + wide * activation)
    kernels = 6 if fused else 20
    forward = Work(memory=streaming_seconds(hardware.chip, moved, kernels))
    return forward, Work(memory=streaming_seconds(hardware.chip, 1.8 * moved, 1.5 * kernels))


def _communication(hardware: Hardware, workload: Workload, traffic: Traffic, beside: float) -> float:
    """Exposed seconds of tp's collectives; where they overlap, all but the first part of each hides in ``beside``."""
    tp = workload.mesh.degree("tp")
    if tp == 1:
        return 0.0
    seconds = 0.0
    for collective, calls in traffic.items():
        group = span(workload.mesh, collective.submesh, hardware.inside.devices)
        seconds += calls * collective_seconds(hardware, collective.operation, collective.bytes, group)
    if workload.system.overlap_tensor_parallel:
        return max(seconds / tp, seconds - beside)
    return seconds


def _host(hardware: Hardware, workload: Workload, operations: float, collectives: float) -> Work:
    """A collective costs the host about as much as four operations."""
    return Work(host=hardware.host.launch_us * 1e-6 * (operations + 4 * collectives))


@lru_cache(maxsize=16384)
def block(hardware: Hardware, key: Workload) -> Phases:
    """Of one block. ``key`` comes from ``key_of``."""
    model, tp, cp = key.model, key.mesh.degree("tp"), key.mesh.degree("cp")
    tokens = key.microbatch_size * key.seq_len // cp
    linears = list(_linears(model, tp, key.system.fused_projections))
    forward = inputs = weights = Work()
    for linear in linears:
        forward += _dense(hardware, key, tokens, linear)
        inputs += _dense(hardware, key, tokens, linear, "inputs")
        weights += _dense(hardware, key, tokens, linear, "weights")
    last = _dense(hardware, key, tokens, linears[-1])
    attention = _attention(hardware, key, backward=False)
    cheap, cheap_backward = _elementwise(hardware, key)
    sent = pieces(key, 0)
    operations = (14 if key.system.fused else 36) + len(linears)
    calls = sum(sent.block_forward.values())
    exposed = _communication(hardware, key, sent.block_forward, forward.device)
    again = _again(key, forward, last, attention, cheap)
    forward = forward + attention + cheap + Work(communication=exposed) + _host(hardware, key, operations, calls)
    backward_calls = sum(sent.block_backward.values())
    exposed = _communication(hardware, key, sent.block_backward, inputs.device + weights.device)
    inputs = inputs + _attention(hardware, key, backward=True) + cheap_backward
    inputs += Work(communication=exposed) + _host(hardware, key, operations, backward_calls)
    weights += _host(hardware, key, len(linears), 0)
    if key.recompute != "none":
        again += _host(hardware, key, operations, 0)
    return Phases(forward, inputs, weights, again * key.system.recompute_share)


def _again(key: Workload, linears: Work, last: Work, attention: Work, cheap: Work) -> Work:
    """What backward computes again: all but the last matmul, or the cheap part and the matmuls not kept."""
    if key.recompute == "none":
        return Work()
    if key.recompute == "full":
        again = linears + last * -1 + attention + cheap
    else:
        again = linears * (1 - key.system.kept_matmuls) + cheap
    return replace(again, ideal=0.0, matmul=again.matmul + again.ideal)


@lru_cache(maxsize=16384)
def ends(hardware: Hardware, key: Workload) -> tuple[Phases, Phases]:
    """Of the embedding; of the output projection with the loss."""
    model, tp, cp = key.model, key.mesh.degree("tp"), key.mesh.degree("cp")
    tokens = key.microbatch_size * key.seq_len // cp
    size, chip, sent = DTYPE_BYTES[key.compute], hardware.chip, pieces(key, 0)
    table = model.vocab_size // tp * model.dim
    looked_up = streaming_seconds(chip, tokens * model.dim * size * 4, 4)
    forward = Work(memory=looked_up, communication=_communication(hardware, key, sent.embedding_forward, 0.0))
    # The gradient of a table is a table: zeros, then sums of the rows that occur.
    zeros = streaming_seconds(chip, table * size, 1)
    backward = Work(memory=looked_up + zeros, communication=_communication(hardware, key, sent.embedding_backward, 0.0))
    embedding = Phases(
        forward + _host(hardware, key, 6, sum(sent.embedding_forward.values())),
        Work(),
        backward + _host(hardware, key, 6, sum(sent.embedding_backward.values())),
        Work(),
    )
    linear = (model.dim, model.vocab_size // tp)
    logits = tokens * model.vocab_size // (tp if key.system.loss_parallel else 1)
    passes = 14 if key.system.fused else 22
    loss = Work(memory=streaming_seconds(chip, logits * passes, 12))
    plain = replace(key, system=replace(key.system, float8=False))
    forward = _dense(hardware, plain, tokens, linear) + loss + _host(hardware, key, 20, 3)
    forward += Work(communication=_communication(hardware, key, sent.output_forward, 0.0))
    inputs = _dense(hardware, plain, tokens, linear, "inputs") + loss * 0.6 + _host(hardware, key, 12, 1)
    inputs += Work(communication=_communication(hardware, key, sent.output_backward, 0.0))
    return embedding, Phases(forward, inputs, _dense(hardware, plain, tokens, linear, "weights"), Work())
