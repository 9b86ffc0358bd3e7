"""Seconds of a rank's work on one microbatch: a block's, and those of both ends of the model. No torch.

Letters: N tokens of a microbatch that the rank computes with inside a tensor-parallel region, D dim, F ffn_dim,
H query heads x head_dim, K kv heads x head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from koushi.hardware.collective import collective_seconds, span
from koushi.hardware.hardware import Hardware
from koushi.hardware.matmul import attention_seconds, matmul_seconds, streaming_seconds
from koushi.mesh import MeshSpec
from koushi.plan.communication import pieces
from koushi.plan.operations import has_fused_attention
from koushi.plan.workload import Recompute, System, Transformer, Workload
from koushi.traffic import DTYPE_BYTES, Traffic


@dataclass(frozen=True)
class Work:
    """Seconds, by what they go to; ``host`` runs beside the others."""

    ideal: float = 0.0
    """What the model's matmuls and attention would take at the chip's peak for their dtype, the causal half of
    attention left out."""
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
        return Work(
            self.ideal * times,
            self.matmul * times,
            self.attention * times,
            self.memory * times,
            self.communication * times,
            self.host * times,
        )


@dataclass(frozen=True)
class Phases:
    """Work of one microbatch, forward and backward; what recompute adds to backward apart."""

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
    return _key(
        workload.model,
        workload.system,
        mesh.degree("tp"),
        mesh.degree("cp"),
        workload.seq_len,
        workload.microbatch_size,
        workload.recompute,
        workload.compute,
    )


@lru_cache(maxsize=16384)
def _key(
    model: Transformer,
    system: System,
    tp: int,
    cp: int,
    seq_len: int,
    microbatch_size: int,
    recompute: Recompute,
    compute: str,
) -> Workload:
    return Workload(
        model=replace(model, n_layers=1),
        mesh=MeshSpec.of(tp=tp, cp=cp),
        stage_layers=(1,),
        schedule="1F1B",
        seq_len=seq_len,
        microbatch_size=microbatch_size,
        microbatches=1,
        recompute=recompute,
        compute=compute,
        system=system,
    )


# Matmuls and attention.


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


def _product(hardware: Hardware, key: Workload, shape: tuple[int, int, int], float8: bool) -> Work:
    """A matmul [m, k] x [k, n] of a projection, given as m, n, k."""
    m, n, k = shape
    dtype = "float8" if float8 else key.compute
    seconds = matmul_seconds(hardware.chip, m, n, k, dtype, newest=key.system.newest_libraries)
    ideal = 2.0 * m * n * k / hardware.chip.peak(dtype)
    return Work(ideal=ideal, matmul=seconds - ideal)


def _dense(hardware: Hardware, key: Workload, tokens: int, linear: Linear, float8: bool = False) -> tuple[Work, ...]:
    """A projection's forward, the gradient of its input and that of its weight.

    Float8: each operand is read for its largest value, read again and written in two layouts, a byte a value. What
    tp gathers in float8 each rank casts but its piece of.
    """
    inputs, outputs = linear
    pieces_of = key.mesh.degree("tp") if key.system.gathers_float8 else 1
    forward = _product(hardware, key, (tokens, outputs, inputs), float8)
    back = _product(hardware, key, (tokens, inputs, outputs), float8)
    weights = _product(hardware, key, (outputs, inputs, tokens), float8)
    if float8:
        size = 2 * DTYPE_BYTES[key.compute] + 2
        # Where parameters are gathered in float8 each rank casts but its shard.
        casts = tokens * inputs // (pieces_of if inputs == key.model.dim else 1)
        casts += 0 if key.system.gathers_float8 else inputs * outputs
        forward += Work(memory=streaming_seconds(hardware.chip, size * casts, 4))
        casts = tokens * outputs // (pieces_of if outputs == key.model.dim else 1)
        back += Work(memory=streaming_seconds(hardware.chip, size * casts, 2))
    return forward, back, weights


def _attention(hardware: Hardware, key: Workload, backward: bool) -> Work:
    model, tp, cp = key.model, key.mesh.degree("tp"), key.mesh.degree("cp")
    chip, heads, length = hardware.chip, max(1, model.n_heads // tp), key.seq_len
    batch, dtype = key.microbatch_size, key.compute
    passes = 2.5 if backward else 1.0
    ideal = 2.0 * passes * batch * heads * length * (length // cp) * model.head_dim / chip.peak(dtype)
    grouped = model.n_kv_heads < model.n_heads and heads > 1
    if key.system.flash_attention and (hardware.device == "cpu" or has_fused_attention(dtype, grouped)):
        kernel = key.system.attention_kernel
        seconds = attention_seconds(chip, batch, heads, length // cp, length, model.head_dim, dtype, backward, kernel)
        return Work(ideal=ideal, attention=seconds - ideal)
    products = matmul_seconds(chip, length // cp, length, model.head_dim, dtype, batch * heads)
    products += matmul_seconds(chip, length // cp, model.head_dim, length, dtype, batch * heads)
    # Scores are written, read and written by a fused softmax, and read; torch's own are masked on their way.
    scores = batch * heads * length * (length // cp) * DTYPE_BYTES[dtype]
    moved = scores * (8 if backward else 6 if key.system.flash_attention else 4)
    seconds = products * (2 if backward else 1) + streaming_seconds(chip, moved, 2)
    return Work(ideal=ideal, attention=seconds - ideal)


# What only moves bytes.


def _elementwise(hardware: Hardware, key: Workload) -> tuple[Work, Work]:
    """Of a block's forward and backward: norms, rotation, activation, residual sums.

    Passes count reads and writes of a value. Fused: what the arithmetic needs at least. Else every operation
    reads and writes on its own.
    """
    model, tp, cp = key.model, key.mesh.degree("tp"), key.mesh.degree("cp")
    fused, size = key.system.fused, DTYPE_BYTES[key.compute]
    tokens = key.microbatch_size * key.seq_len // cp
    narrow = tokens * model.dim // (tp if key.system.sequence_parallel else 1)
    rotated = tokens * (model.n_heads + model.n_kv_heads) * model.head_dim // tp
    wide = tokens * model.ffn_dim // tp
    norms = 2 * (2 if fused else 4)
    residual = 2 * (2 if fused else 3)
    rotation = 0 if model.learned_positions else (2 if fused else 10)
    activation = (3 if fused else 5) if model.gated else (2 if fused else 3)
    moved = size * (narrow * (norms + residual) + rotated * rotation + wide * activation)
    kernels = 6 if fused else 20
    forward = Work(memory=streaming_seconds(hardware.chip, moved, kernels))
    # The gradients that several projections send back to one input are added up, two at a time.
    sums = 0 if key.system.fused_projections else (3 if model.gated else 2)
    added = size * tokens * model.dim * 3 * sums
    return forward, Work(memory=streaming_seconds(hardware.chip, 1.8 * moved + added, 1.5 * kernels + sums))


# What tensor parallel sends, and what the host does.


def _communication(hardware: Hardware, key: Workload, traffic: Traffic, beside: float = 0.0) -> Work:
    """tp's collectives, exposed; where they overlap, all but the first part of each hides in ``beside``.

    Pieces along the sequence of several samples are not contiguous: they are copied besides.
    """
    seconds, copied, tp = 0.0, 0.0, key.mesh.degree("tp")
    copies = key.microbatch_size > 1 and not key.system.sequence_first
    for collective, calls in traffic.items():
        if copies and collective.operation in ("all_gather", "reduce_scatter"):
            copied += 2.0 * calls * collective.bytes
        group = span(key.mesh, collective.submesh, hardware.inside.devices)
        narrow = key.system.gathers_float8 and collective.operation == "all_gather"
        size = collective.bytes // (DTYPE_BYTES[key.compute] if narrow else 1)
        seconds += calls * collective_seconds(hardware, collective.operation, size, group)
    if tp > 1 and key.system.overlap_tensor_parallel:
        seconds = max(seconds / tp, seconds - beside)
    return Work(communication=seconds, memory=copied / (hardware.chip.memory_bandwidth * hardware.chip.streaming))


def _host(hardware: Hardware, operations: float, traffic: Traffic | None = None) -> Work:
    """A collective costs the host about as much as four operations."""
    calls = sum(traffic.values()) if traffic else 0
    return Work(host=hardware.host.launch_us * 1e-6 * (operations + 4 * calls))


@lru_cache(maxsize=16384)
def block(hardware: Hardware, key: Workload) -> Phases:
    """Of one block. ``key`` comes from ``key_of``."""
    system = key.system
    tokens = key.microbatch_size * key.seq_len // key.mesh.degree("cp")
    linears = list(_linears(key.model, key.mesh.degree("tp"), system.fused_projections))
    dense = [_dense(hardware, key, tokens, linear, system.float8) for linear in linears]
    products, inputs, weights = (sum(column, Work()) for column in zip(*dense, strict=True))
    attention = _attention(hardware, key, backward=False)
    cheap, cheap_backward = _elementwise(hardware, key)
    sent = pieces(key, 0)
    operations = system.host_operations or (14 if system.fused else 36) + len(linears)
    forward = products + attention + cheap + _communication(hardware, key, sent.block_forward, products.device)
    forward += _host(hardware, operations, None if system.host_operations else sent.block_forward)
    beside = inputs.device + weights.device
    inputs = inputs + _attention(hardware, key, backward=True) + cheap_backward
    inputs += _communication(hardware, key, sent.block_backward, beside)
    inputs += _host(hardware, operations, None if system.host_operations else sent.block_backward)
    again = _again(key, products, dense[-1][0], attention, cheap)
    if key.recompute != "none":
        again += _host(hardware, operations)
    phases = Phases(forward, inputs, weights, again * system.recompute_share)
    return _waited_for(phases) if system.blocking_launches else phases


def _waited_for(phases: Phases) -> Phases:
    """With the host's time on the device's, where it waits for every kernel."""
    parts = (phases.forward, phases.inputs, phases.weights, phases.again)
    return Phases(*(replace(part, memory=part.memory + part.host, host=0.0) for part in parts))


def _again(key: Workload, products: Work, last: Work, attention: Work, cheap: Work) -> Work:
    """What backward computes again: all but the last matmul, or the cheap part and the matmuls not kept."""
    if key.recompute == "none":
        return Work()
    if key.recompute == "full":
        again = products + attention + cheap
        if key.system.stops_early:
            again += last * -1
    else:
        again = products * (1 - key.system.kept_matmuls) + cheap
    return replace(again, ideal=0.0, matmul=again.matmul + again.ideal)


@lru_cache(maxsize=16384)
def ends(hardware: Hardware, key: Workload) -> tuple[Phases, Phases]:
    """Of the embedding; of the output projection with the loss."""
    return _embedding(hardware, key), _output(hardware, key)


def _embedding(hardware: Hardware, key: Workload) -> Phases:
    """Rows looked up; backward makes a table of zeros and adds the rows that occur."""
    model, tp, chip, sent = key.model, key.mesh.degree("tp"), hardware.chip, pieces(key, 0)
    tokens, size = key.microbatch_size * key.seq_len // key.mesh.degree("cp"), DTYPE_BYTES[key.compute]
    rows = Work(memory=streaming_seconds(chip, tokens * model.dim * size * 4, 4))
    table = Work(memory=streaming_seconds(chip, model.vocab_size // tp * model.dim * size, 1))
    forward = rows + _communication(hardware, key, sent.embedding_forward) + _host(hardware, 6, sent.embedding_forward)
    backward = rows + table + _communication(hardware, key, sent.embedding_backward)
    return Phases(forward, Work(), backward + _host(hardware, 6, sent.embedding_backward), Work())


def _output(hardware: Hardware, key: Workload) -> Phases:
    """The projection to the vocabulary, never in float8, and the loss.

    A logit is cast, read for the maximum, exponentiated, summed and, in backward, made a slope and cast again.
    """
    model, tp, chip, sent = key.model, key.mesh.degree("tp"), hardware.chip, pieces(key, 0)
    tokens = key.microbatch_size * key.seq_len // key.mesh.degree("cp")
    forward, inputs, weights = _dense(hardware, key, tokens, (model.dim, model.vocab_size // tp))
    logits = tokens * model.vocab_size // (tp if key.system.loss_parallel else 1)
    moved = logits * (14 if key.system.fused else 22)
    forward += Work(memory=streaming_seconds(chip, moved, 12)) + _host(hardware, 20, sent.output_forward)
    forward += _communication(hardware, key, sent.output_forward)
    inputs += Work(memory=streaming_seconds(chip, 0.6 * moved, 8)) + _host(hardware, 12, sent.output_backward)
    inputs += _communication(hardware, key, sent.output_backward)
    return Phases(forward, inputs, weights, Work())
