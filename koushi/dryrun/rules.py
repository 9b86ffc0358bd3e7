"""The audit's rules on one rank: every collective on the sub-mesh that owns it, none for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from koushi.dryrun.findings import Record, described, is_scalar
from koushi.dryrun.flow import Facts
from koushi.mesh import MeshSpec
from koushi.parallel.ledger import Event
from koushi.traffic import ALLOWED

Said = tuple[str, str]
"""What is wrong, and what to do."""


@dataclass(frozen=True)
class Case:
    """One event, with what a rule may want to know of it."""

    event: Event
    facts: Facts
    record: Record
    copied_over_tp: frozenset[str]
    """Names of parameters that every tp rank holds whole."""

    @property
    def mesh(self) -> MeshSpec:
        return self.record.ledger.mesh

    @property
    def degree(self) -> int:
        return len(self.event.ranks)


Rule = Callable[[Case], Said | None]


def group_of_one(case: Case) -> Said | None:
    if case.degree > 1:
        return None
    return "the group has one rank, so nothing can travel", "Leave it out where the degree is 1."


def no_submesh(case: Case) -> Said | None:
    if case.degree == 1 or not case.event.collective.submesh.startswith("ranks"):
        return None
    return "its group is no dim or fold of the mesh", f"Use a group of the mesh {case.mesh}."


def not_allowed(case: Case) -> Said | None:
    one = case.event.collective
    if case.degree == 1 or one.submesh.startswith("ranks") or one.operation in ALLOWED.get(one.submesh, ()):
        return None
    allowed = ", ".join(sorted(ALLOWED.get(one.submesh, ())))
    what = f"{one.operation} of {_content(case)} is not what {one.submesh} is for"
    if allowed:
        return what, f"On {one.submesh} only {allowed} may move tensors."
    return what, f"Tensors travel along {', '.join(ALLOWED)}, each on its own."


def wrong_submesh(case: Case) -> Said | None:
    """The operation may run there, but not on these tensors."""
    one, facts = case.event.collective, case.facts
    if one.submesh == "tp" and facts.parameters and one.operation != "all_reduce":
        return f"{_content(case)} moves over tp, which is for activations", "Gather parameters over dp_shard."
    if one.submesh == "tp" and one.operation == "all_reduce" and not is_scalar(case.event):
        cut = [name for name in facts.gradients if name not in case.copied_over_tp]
        if cut:
            return f"tp ranks hold different pieces of {_names(cut)}, which it adds up", "Leave cut parameters out."
        if one.phase == "backward":
            return "tp ranks finish gradients once, after backward", "Reduce gradients over data parallel."
    gathers = one.submesh == "dp_shard" and one.operation == "all_gather"
    if gathers and not (facts.parameters or facts.padding):
        return "activations are gathered over dp_shard, which is for parameters", "Gather activations over tp."
    reduces = (one.submesh, one.operation) in {("dp_shard", "reduce_scatter"), ("dp_replicate", "all_reduce")}
    if reduces and one.phase != "backward" and not is_scalar(case.event) and not facts.gradients:
        return f"what is reduced over {one.submesh} is no gradient", "Reduce activations over tp."
    return None


def no_neighbour(case: Case) -> Said | None:
    one, peer = case.event.collective, case.event.peer
    if one.submesh != "pp" or peer is None:
        return None
    rank, degree = case.record.ledger.rank, case.mesh.degree("pp")
    apart = (case.mesh.index(peer, "pp") - case.mesh.index(rank, "pp")) % degree
    if apart in (1, degree - 1):
        return None
    return f"rank {peer} is no neighbour of rank {rank} along pp", "Pass it on from stage to stage."


def counts_twice(case: Case) -> Said | None:
    if not case.facts.complete:
        return None
    return (
        f"it adds up what is the same on all {case.degree} ranks already, so {_content(case)} counts "
        f"{case.degree} times",
        "Sum over a dim once, and only over dims that split it.",
    )


def averages(case: Case) -> Said | None:
    one = case.event.collective
    if not one.submesh.startswith("dp") or one.phase != "backward":
        return None
    if case.event.reduction == "avg":
        what = "it averages"
    elif case.facts.scaled is not None:
        what = f"gradients are scaled by {case.facts.scaled:g} besides"
    else:
        return None
    return f"{what}, but the loss is divided by the tokens of the global batch already", "Sum them, as they are."


def gathered_again(case: Case) -> Said | None:
    if case.facts.again is None or case.facts.padding:
        return None
    first = case.record.ledger.events[case.facts.again]
    return f"the same was gathered before ({described(first)})", "Use what was gathered first."


def undone(case: Case) -> Said | None:
    if not case.facts.undone:
        return None
    return "the gather is undone at once: a rank uses no more than what it put in", "Leave out both."


RULES: Mapping[str, Rule] = {
    "group of one": group_of_one,
    "no sub-mesh": no_submesh,
    "not allowed": not_allowed,
    "wrong sub-mesh": wrong_submesh,
    "no neighbour": no_neighbour,
    "counts twice": counts_twice,
    "averages": averages,
    "gathered again": gathered_again,
    "undone": undone,
}


def broken(case: Case) -> Iterator[tuple[str, Said]]:
    """Every rule that an event breaks, by name."""
    for name, rule in RULES.items():
        said = rule(case)
        if said is not None:
            yield name, said


def _content(case: Case) -> str:
    if case.facts.parameters:
        return _names(case.facts.parameters)
    return f"the gradient of {_names(case.facts.gradients)}" if case.facts.gradients else "it"


def _names(names: tuple[str, ...] | list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
