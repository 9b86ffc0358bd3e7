"""Layouts whose predicted step is held against an executed one: all techniques, schedules and what doesn't divide."""

from __future__ import annotations

from collections.abc import Iterator

from parity_cases import MULTI_STAGE, SPLIT_BACKWARD, Case, batch, case, schedule, tied
from parity_special import TWENTY

BFLOAT16 = ("precision.compute=bfloat16",)


def quick() -> Iterator[Case]:
    yield case("", (1, 1, 2, 1), *batch(3, 1, 2), *BFLOAT16)
    yield case("full", (1, 1, 1, 2), tied(True), "training.recompute=full")
    yield case("1F1B", (2, 1, 1, 1), *schedule("1F1B"), tied(True))


def thorough() -> Iterator[Case]:
    for how in ("none", "selective", "full"):
        again = f"training.recompute={how}"
        yield case(how, (1, 1, 2, 2), again, *batch(2, 1, 2), *BFLOAT16)
        yield case(how, (1, 2, 2, 1), again, *batch(3, 1, 4))
        yield case(f"1F1B {how}", (2, 1, 2, 1), *schedule("1F1B"), again, tied(True), *BFLOAT16)
    yield case("kept gathered", (1, 1, 2, 1), *batch(3, 1, 2), "parallelism.reshard_after_forward=never")
    yield case("replicated", (1, 2, 1, 1), *batch(3, 1, 2), tied(True), *BFLOAT16)
    yield case("copied heads", (1, 1, 1, 4), tied(True))
    yield case("GPipe", (2, 2, 1, 1), *schedule("GPipe"), *BFLOAT16)
    for name in MULTI_STAGE:
        again = "training.recompute=" + ("full" if name in SPLIT_BACKWARD else "selective")
        yield case(name, (2, 1, 2, 1), *schedule(name), again, tied(name == "DualPipeV"), *BFLOAT16)
        yield case(name, (2, 1, 1, 2), *schedule(name), tied(name != "DualPipeV"))
    yield case("uneven", (1, 1, 4, 1), *TWENTY, tied(True), *BFLOAT16)
    yield case("uneven 1F1B", (2, 1, 4, 1), *TWENTY, *schedule("1F1B"))
    yield case("stages 0-5", (2, 1, 2, 1), *schedule("1F1B", 0, 5), tied(True))
