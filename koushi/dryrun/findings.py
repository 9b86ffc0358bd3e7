"""What the audit says: a finding for every collective that should not be, and why some are let pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from koushi.dryrun.flow import Facts
from koushi.job import Job
from koushi.parallel.ledger import Event, Ledger
from koushi.plan.unshard import MOST_UNSHARDED
from koushi.units import bytes_text

SCALARS = 2
"""Elements that still are scalars: a loss and a norm travel as one tensor."""
_SHOWN = 4


@dataclass(frozen=True)
class Record:
    """What one rank did, and what is known of it."""

    ledger: Ledger
    facts: tuple[Facts, ...]
    """Of every event, in order."""


@dataclass(frozen=True)
class Finding:
    rule: str
    event: Event
    """The first of those that it is about."""
    ranks: tuple[int, ...]
    """Those that issue it."""
    what: str
    do: str
    """What would mend it."""
    times: int = 1
    """How often one of the ranks does so."""

    def __str__(self) -> str:
        often = f" {self.times} times," if self.times > 1 else ""
        return f"{self.rule}: {described(self.event)}:{often} {self.what}; {_ranks(self.ranks)}. {self.do}"


def described(event: Event) -> str:
    """Sub-mesh, operation, bytes, module and line of an event."""
    one = event.collective
    module = event.module or "the model as a whole"
    peer = "" if event.peer is None else f" {'to' if one.operation == 'send' else 'from'} rank {event.peer}"
    return (
        f"{one.operation}{peer} of {bytes_text(one.bytes)} ({one.dtype}) on {one.submesh} in {one.phase}, "
        f"{module}, {event.site}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    rest = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{rest}"


@dataclass(frozen=True)
class Exemption:
    """What a rule would find and is right all the same."""

    rule: str
    applies: Callable[[Event, Facts, Job], bool]
    reason: str


def is_scalar(event: Event) -> bool:
    """A sum of the loss, the norm or the count of tokens."""
    one = event.collective
    return (
        one.operation == "all_reduce"
        and event.elements <= SCALARS
        and one.phase in ("start", "optimizer")
        and not one.submesh.startswith("ranks")
    )


def _is_tied_exchange(event: Event, facts: Facts, job: Job) -> bool:
    """The other end's gradient comes unnamed."""
    one = event.collective
    tied = {"tok_embeddings.weight", "output.weight"}
    return (
        one.submesh == "pp"
        and one.phase == "optimizer"
        and (one.operation == "recv" or (len(facts.gradients) == 1 and tied.issuperset(facts.gradients)))
    )


def _is_gathered_with_the_rest(event: Event, facts: Facts, job: Job) -> bool:
    """For backward; torch's runtime of many stages has it done before, in a phase of forwards."""
    one = event.collective
    early = one.phase == "forward" and job.stages_per_rank > MOST_UNSHARDED
    return (
        (one.submesh, one.operation) == ("dp_shard", "all_gather")
        and (one.phase == "backward" or early)
        and (facts.padding or set(facts.parameters) == {"tok_embeddings.weight"})
        and event.module == "tok_embeddings"
    )


EXEMPTIONS = (
    Exemption(
        "not allowed",
        lambda event, facts, job: is_scalar(event),
        "loss, gradient norm and the number of valid tokens are summed over every sub-mesh that they are split over",
    ),
    Exemption(
        "no neighbour",
        _is_tied_exchange,
        "the first and the last stage add up the gradients of an embedding that they share",
    ),
    Exemption(
        "unused",
        _is_gathered_with_the_rest,
        "torch gathers every unit again for backward, also the embedding, whose backward does not read its table",
    ),
)


def exempt(rule: str, event: Event, facts: Facts, job: Job) -> bool:
    return any(each.rule == rule and each.applies(event, facts, job) for each in EXEMPTIONS)
