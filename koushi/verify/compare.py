"""Two runs of one job under different layouts, compared number by number."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from koushi.verify.record import Piece, RankRecord

TensorKey = tuple[str, str, int]
"""Kind, name, step."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that floating-point reduction order explains."""

    scalars: float
    """Of losses and gradient norms."""
    tensors: float
    """Of gradients, parameters and optimizer state."""
    order: float
    """Of the norm by which tensors differ: inf for the worst element, 2 for the root mean square.

    AdamW divides a gradient by its own size, so where a gradient is all rounding error the update is too: in
    float32 single elements say nothing after the first step.
    """


KINDS = ("initial", "loss", "gradient norm", "gradient", "parameter", "exp_avg", "exp_avg_sq")
TOLERANCES = {
    "float32": Tolerance(scalars=1e-5, tensors=1e-4, order=2),
    "float64": Tolerance(scalars=1e-12, tensors=1e-9, order=math.inf),
}


@dataclass(frozen=True)
class Difference:
    """The largest relative difference among everything of one kind."""

    kind: str
    relative: float
    where: str
    tolerance: float

    @property
    def within(self) -> bool:
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class Assembled:
    """What the ranks of a run hold together."""

    records: Sequence[RankRecord]
    tensors: dict[TensorKey, Tensor]
    """Unsharded; nan where no rank holds an element."""
    wrong: list[str]
    """Elements that no rank holds, and copies of one that differ in any bit."""


def assemble(records: Sequence[RankRecord]) -> Assembled:
    pieces: dict[TensorKey, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, record in enumerate(records):
        for piece in record.pieces:
            pieces[(piece.kind, piece.name, piece.step)].append((rank, piece))
    whole: dict[TensorKey, Tensor] = {}
    wrong: list[str] = []
    for key, held in pieces.items():
        whole[key] = _together(key, held, wrong)
    return Assembled(records, whole, wrong)


def _together(key: TensorKey, held: Sequence[tuple[int, Piece]], wrong: list[str]) -> Tensor:
    """One tensor; what is wrong with it is added to ``wrong``."""
    name = " ".join(map(str, key))
    full = torch.full(held[0][1].shape, math.nan, dtype=held[0][1].values.dtype)
    filled = torch.zeros(full.shape, dtype=torch.bool)
    first: dict[tuple[tuple[int, int], ...], Tensor] = {}
    for rank, piece in held:
        copy = first.setdefault(tuple((part.start, part.stop) for part in piece.part), piece.values)
        if copy is not piece.values and torch.equal(copy, piece.values):
            continue  # most are, and this is the quickest way to tell
        here, seen = full[piece.part], filled[piece.part]
        if bool(seen.any()) and not torch.equal(here[seen], piece.values[seen]):
            wrong.append(f"{name}: rank {rank} holds other numbers than a rank before it")
        full[piece.part] = piece.values
        filled[piece.part] = True
    if not bool(filled.all()):
        wrong.append(f"{name}: {int((~filled).sum())} elements are held by no rank")
    return full


def relative(reference: Tensor, other: Tensor, order: float = math.inf) -> float:
    """Norm of the difference over norm of the reference: the largest absolute value, or the Euclidean for 2.

    inf where either is not finite, or where all of the reference is 0 and the other is not.
    """
    if not (bool(reference.isfinite().all()) and bool(other.isfinite().all())):
        return math.inf
    difference = torch.linalg.vector_norm(reference - other, order).item()
    norm = torch.linalg.vector_norm(reference, order).item()
    return difference / norm if norm else (math.inf if difference else 0.0)


def compare(
    reference: Sequence[RankRecord], records: Sequence[RankRecord], tolerance: Tolerance
) -> tuple[list[Difference], list[str]]:
    """The largest difference of every kind, and faults of the layout itself (see ``Assembled``)."""
    return compare_assembled(assemble(reference), assemble(records), tolerance)


def compare_assembled(
    reference: Assembled, other: Assembled, tolerance: Tolerance
) -> tuple[list[Difference], list[str]]:
    """``compare`` of what is assembled already."""
    expected, found, wrong = reference.tensors, other.tensors, list(other.wrong)
    if expected.keys() != found.keys():
        wrong.append(f"tensors held by one layout only: {sorted(map(str, expected.keys() ^ found.keys()))[:5]}")
    worst: dict[str, Difference] = {}

    def note(kind: str, difference: float, where: str, allowed: float) -> None:
        if kind not in worst or not difference <= worst[kind].relative:
            worst[kind] = Difference(kind, difference, where, allowed)

    for rank, record in enumerate(other.records):
        for kind, ours, theirs in (
            ("loss", reference.records[0].losses, record.losses),
            ("gradient norm", reference.records[0].grad_norms, record.grad_norms),
        ):
            for step, (one, two) in enumerate(zip(ours, theirs, strict=True)):
                note(kind, relative(_double(one), _double(two)), f"step {step} on rank {rank}", tolerance.scalars)
    for key in expected.keys() & found.keys():
        kind, name, step = key
        allowed = 0.0 if kind == "initial" else tolerance.tensors
        difference = relative(expected[key], found[key], tolerance.order)
        note(kind, difference, f"{name} at step {step}", allowed)
    return [worst[kind] for kind in KINDS if kind in worst], wrong


def unmoved(reference: Sequence[RankRecord], tolerance: Tolerance) -> dict[str, float]:
    """Parameters that all steps together moved by less than is allowed for rounding, with that share of their size: of
    those nothing shows that another layout updates them."""
    whole = assemble(reference).tensors
    moved = {
        name: relative(whole["initial", name, 0], values, tolerance.order)
        for (kind, name, _), values in whole.items()
        if kind == "parameter"
    }
    return {name: share for name, share in moved.items() if share <= tolerance.tensors}


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
