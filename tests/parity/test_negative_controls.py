"""Faults seeded into the implementation, each of which the comparison must find.

Ranks are forked, so what a test patches here is patched there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_cases import Case, batch, case, schedule, tied
from parity_run import STEPS, TOLERANCES, References, chunks, differing, failures, in_words, precision, run
from seeded import Patch, averaged

from koushi.data.batches import train_batch
from koushi.loss import valid_tokens
from koushi.models.llama.layout import Parameter, parameters
from koushi.optim.adamw import AdamW
from koushi.optim.initial import draw
from koushi.parallel import compose, data, gradients, shards
from koushi.train.step import TrainStep
from koushi.verify import record


def partial_norms(patch: Patch) -> None:
    """Gradients of parameters copied over tp stay what one rank saw."""
    patch.setattr(gradients, "sum_over", lambda tensors, group: None)


def tied_apart(patch: Patch) -> None:
    """The two ends of a tied embedding keep their own gradients."""
    patch.setattr(gradients, "_add_tied", lambda *_: None)


def drifting(patch: Patch) -> None:
    """One replica's weights drift by less than any tolerance."""
    original = AdamW.step

    def step(self: AdamW, values: Any, *rest: Any) -> None:
        original(self, values, *rest)
        if dist.get_rank() == 1:
            values["layers.0.attention.wo.weight"].view(-1)[3] *= 1 + 1e-15

    patch.setattr(AdamW, "step", step)


def counted_often(patch: Patch) -> None:
    """Every tp rank counts the parameters that all of them hold."""
    original = gradients.squared_norm
    patch.setattr(gradients, "squared_norm", lambda held: original([replace(one, counted=True) for one in held]))


def own_tokens(patch: Patch) -> None:
    """Each rank divides by the valid tokens that it sees itself, scaled to the whole batch."""

    def total(self: TrainStep, labels: torch.Tensor) -> torch.Tensor:
        return valid_tokens(labels).clamp(min=1) * 2

    patch.setattr(TrainStep, "_total_tokens", total)


def others_samples(patch: Patch) -> None:
    """The second data-parallel rank reads what the first does."""
    patch.setattr(record, "train_batch", lambda samples, first, local, index: train_batch(samples, first, local, 0))


def other_start(patch: Patch) -> None:
    """One rank draws one weight from another seed."""

    def drawn(seed: int, name: str, *rest: Any) -> torch.Tensor:
        return draw(seed + (name == "layers.2.feed_forward.w2.weight" and dist.get_rank() == 1), name, *rest)

    patch.setattr(shards, "draw", drawn)


def own_clipping(patch: Patch) -> None:
    """One rank clips to a norm that is off by a millionth."""
    original = gradients.clip

    def clip(held: Any, norm: torch.Tensor, highest: float) -> None:
        original(held, norm * (1 + 1e-6 * dist.get_rank()), highest)

    patch.setattr(gradients, "clip", clip)


def resharded(patch: Patch) -> None:
    """Torch's own fault, for which check refuses the combination: resharding under a zero-bubble schedule."""
    original = data.apply

    def apply(module: Any, submesh: Any, options: data.DataParallel, *rest: Any) -> Any:
        return original(module, submesh, replace(options, reshard_after_forward=True), *rest)

    patch.setattr(data, "apply", apply)


def other_head(patch: Patch) -> None:
    """Ranks compute with the KV head that belongs to others' queries."""
    original = compose.tensor_parallel_options
    patch.setattr(compose, "tensor_parallel_options", lambda size, tp, index: original(size, tp, tp - 1 - index))


def left_out(patch: Patch) -> None:
    """A layer is forgotten by the optimizer."""
    original = AdamW.step

    def step(self: AdamW, values: Any, slopes: Any, *rest: Any) -> None:
        kept = {name: slope for name, slope in slopes.items() if "layers.1." not in name}
        original(self, values, kept, *rest)

    patch.setattr(AdamW, "step", step)


def last_microbatch(patch: Patch) -> None:
    """Only the last microbatch's gradient stays."""
    original = TrainStep._microbatch

    def microbatch(self: TrainStep, tokens: Any, labels: Any, last: bool) -> torch.Tensor:
        for one in self._model.parameters:
            one.tensor.grad = None
        return original(self, tokens, labels, last)

    patch.setattr(TrainStep, "_microbatch", microbatch)


def cut_elsewhere(patch: Patch) -> None:
    """The layout says that a matrix is cut where another part of it lies."""
    original = shards.local_slices

    def slices(shape: Any, cuts: Any, degrees: Any, coordinate: Any) -> Any:
        turned = {name: degrees[name] - 1 - index for name, index in coordinate.items()}
        return original(shape, cuts, degrees, turned if tuple(shape) == (64, 32) else coordinate)

    patch.setattr(shards, "local_slices", slices)


@dataclass(frozen=True)
class Fault:
    install: Callable[[Patch], None]
    case: Case
    finds: tuple[str, ...]
    """What the comparison must say, each somewhere in its findings."""


SHARD2, REPLICATE2, TP2, TP4, PP2 = (1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 1, 2), (1, 1, 1, 4), (2, 1, 1, 1)
TIED = case("1F1B", PP2, *schedule("1F1B"), *batch(2, 2), tied(True))
TIED_V = case("ZBVZeroBubble", PP2, *schedule("ZBVZeroBubble"), *batch(4, 2), tied(True))
COPIES = "holds other numbers"
FAULTS = (
    Fault(averaged, case("", SHARD2), ("gradient norm", "gradient:")),
    Fault(averaged, case("", REPLICATE2), ("gradient norm", "gradient:")),
    Fault(partial_norms, case("", TP2), ("gradient norm", "gradient:", COPIES)),
    Fault(
        tied_apart, case("", PP2, *schedule("1F1B"), *batch(2, 2), tied(True)), ("gradient norm", "gradient:", COPIES)
    ),
    Fault(
        tied_apart,
        case("", PP2, *schedule("ZBVZeroBubble"), *batch(4, 2), tied(True)),
        ("gradient norm", "gradient:", COPIES),
    ),
    Fault(drifting, case("", REPLICATE2), (COPIES,)),
    Fault(counted_often, case("", TP2), ("gradient norm",)),
    Fault(counted_often, TIED, ("gradient norm",)),
    Fault(own_tokens, case("", SHARD2), ("loss", "gradient:")),
    Fault(others_samples, case("", REPLICATE2), ("loss", "gradient:")),
    Fault(other_start, case("", SHARD2), ("initial:",)),
    Fault(other_start, case("", REPLICATE2), ("initial",)),
    Fault(own_clipping, case("", SHARD2), ("exp_avg:",)),
    Fault(own_clipping, case("", REPLICATE2), (COPIES,)),
    Fault(
        resharded,
        case("ZBVZeroBubble", (2, 1, 2, 1), *schedule("ZBVZeroBubble"), *batch(4, 1, 2)),
        ("gradient norm", "gradient:"),
    ),
    Fault(other_head, case("2x2", TP4, *batch(2, 2)), ("loss", "gradient:")),
    Fault(left_out, case("", SHARD2), ("parameter:", "held by one layout only")),
    Fault(last_microbatch, case("3x1", (1, 1, 1, 1), *batch(3, 1)), ("gradient norm", "gradient:")),
    Fault(cut_elsewhere, case("", TP2), ("loss", "gradient:")),
)


def _findings(one: Case, references: References, install: Callable[[Patch], None]) -> list[str]:
    job = one.job(references.folder, *precision("float64"))
    steps = STEPS["float64"]
    reference = references.of(job, steps)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        records = run([job], steps, references.folder)[0]
    return differing(job, steps, reference, records, TOLERANCES["float64"], "float64")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.install.__name__} {fault.case.name}")
def test_a_fault_is_found(fault: Fault, references: References) -> None:
    found = _findings(fault.case, references, fault.install)
    for text in fault.finds:
        assert any(text in one for one in found), f"nothing says {text!r}: {found}"


def test_every_control_is_sound_without_its_fault(references: References) -> None:
    controls = {fault.case.name: fault.case for fault in FAULTS}
    assert len(controls) >= 8
    for cases in chunks(controls.values()):
        found = failures(cases, "float64", references)
        assert not found, in_words(found)


def test_the_model_of_the_controls_has_what_they_break(references: References) -> None:
    job = case("", TP4).job(references.folder)
    described: dict[str, Parameter] = parameters(job.size)
    assert {"layers.0.attention.wo.weight", "layers.2.feed_forward.w2.weight"} <= described.keys()
    assert any(one.shape == (64, 32) for one in described.values())
