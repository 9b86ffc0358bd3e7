"""The audit of all ranks: each one's collectives by the rules, and all together for what would hang.

Ranks that run alike are given by one of them; where a rule compares ranks of a group, that one stands
for all of its kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from koushi.dryrun.findings import Finding, Record, exempt
from koushi.dryrun.ranks import RankClass
from koushi.dryrun.rules import Case, broken
from koushi.dryrun.sequences import Members, hangs, members
from koushi.job import Job
from koushi.models.llama import layout as llama


def audit(job: Job, classes: Sequence[RankClass], records: Mapping[int, Record]) -> list[Finding]:
    """Every finding, alike ones together; ``records`` has the representative of every class."""
    everyone = {rank: records[one.representative] for one in classes for rank in one.ranks}
    found: list[Finding] = []
    groups = members(job.mesh, everyone)
    by_one, all_of_it = _counted_by_one(groups), _gathered_from_one(groups)
    for one in classes:
        found += _of_rank(job, one, records[one.representative], by_one, all_of_it)
    found += _unused(job, groups)
    found += _copies_counted(groups)
    found += hangs(job.mesh, everyone, groups)
    return list(_together(found))


def _counted_by_one(groups: Sequence[Members]) -> set[tuple[int, int]]:
    """Sums in which one rank of the group alone adds what all hold alike, and the others nothing: record and event."""
    found = set()
    for group in groups:
        for place in group.places:
            adding = [(id(record), number) for record, number in place if record.facts[number].complete]
            if len(adding) == 1:
                found.update(adding)
    return found


def _gathered_from_one(groups: Sequence[Members]) -> set[tuple[int, int]]:
    """Gathers to which one rank of the group alone brings more than padding: all that anyone then uses is that rank's
    piece. Record and event."""
    found: set[tuple[int, int]] = set()
    for group in groups:
        for place in group.places:
            if sum(not record.facts[number].padding for record, number in place) == 1:
                found.update((id(record), number) for record, number in place)
    return found


def _of_rank(
    job: Job, one: RankClass, record: Record, by_one: set[tuple[int, int]], all_of_it: set[tuple[int, int]]
) -> Iterator[Finding]:
    described = llama.parameters(job.size, job.mesh.degree("tp"))
    copied = frozenset(name for name, parameter in described.items() if parameter.copied_over_tp)
    for number, (event, facts) in enumerate(zip(record.ledger.events, record.facts, strict=True)):
        if event.once:
            continue
        if (id(record), number) in by_one:
            facts = replace(facts, complete=False)
        if (id(record), number) in all_of_it:
            facts = replace(facts, undone=False)
        for rule, (what, do) in broken(Case(event, facts, record, copied)):
            if not exempt(rule, event, facts, job):
                yield Finding(rule, event, one.ranks, what, do)


def _unused(job: Job, groups: Sequence[Members]) -> Iterator[Finding]:
    """Results that no rank of the group uses."""
    for group in groups:
        for place in group.places:
            facts = [record.facts[number] for record, number in place]
            event = place[0][0].ledger.events[place[0][1]]
            if all(each.unused for each in facts) and not exempt("unused", event, facts[0], job):
                what = "nothing is computed from its result"
                yield Finding("unused", event, group.ranks, what, "Leave it out, or use what it gives.")


def _copies_counted(groups: Sequence[Members]) -> Iterator[Finding]:
    """Sums to which several ranks add the same term; of copies one rank may count its own."""
    for group in groups:
        for place in group.places:
            facts = [record.facts[number] for record, number in place]
            count = sum(each.counts_copies for each in facts)
            if count > 1 and not any(each.complete for each in facts):
                event = place[0][0].ledger.events[place[0][1]]
                what = f"{count} ranks of a group each add what they hold alike, which so counts {count} times"
                yield Finding("copies counted", event, group.ranks, what, "Let one rank of the group count it.")


def _together(found: Sequence[Finding]) -> Iterator[Finding]:
    """Findings that say the same of the same line, with every rank and how often one of them does so."""
    alike: dict[object, list[Finding]] = defaultdict(list)
    for one in found:
        collective = one.event.collective
        key = (one.rule, collective.submesh, collective.operation, collective.phase, one.event.module, one.event.site)
        alike[key].append(one)
    for each in alike.values():
        ranks = tuple(sorted({rank for one in each for rank in one.ranks}))
        yield replace(each[0], ranks=ranks, times=sum(ranks[0] in one.ranks for one in each))
