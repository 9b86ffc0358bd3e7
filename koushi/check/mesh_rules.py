"""Rules on the degrees: together they make the world."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from koushi.check.rule import (
    DP_REPLICATE,
    DP_SHARD,
    PER_RANK,
    PER_STAGE,
    PP,
    TP,
    WORLD,
    Facts,
    Finding,
    Rule,
    listed,
    multiples_near,
)
from koushi.config.schema import SHARD_NEEDED
from koushi.mesh import MOST_DEVICES


def _each_degree(facts: Facts) -> Iterator[Finding]:
    shard = facts.config.parallelism.data_parallel_shard_degree
    if shard < -1 or shard == 0:
        yield Finding((DP_SHARD,), f"is {shard}", SHARD_NEEDED, (DP_SHARD,))


def _largest(key: str) -> Rule:
    def find(facts: Facts) -> Iterator[Finding]:
        degree = getattr(facts.config.parallelism, key.rpartition(".")[2])
        if degree is not None and degree > MOST_DEVICES:
            # A dp_shard that follows from the world would only say the same once more.
            spoils = (WORLD, DP_SHARD) if key == WORLD and facts.shard_follows else (key,)
            yield Finding((key,), f"is {degree}, more than any lattice has", f"at most {MOST_DEVICES}", spoils)

    return Rule((key,), find)


def _launched(facts: Facts) -> Iterator[Finding]:
    asked, launched = facts.config.parallelism.world_size, facts.launched
    if launched is not None and asked is not None and launched != asked:
        what = f"is {asked}, but the world has {launched} processes{facts.made_up_of}"
        place = facts.run_file.places.get(WORLD)
        typed = place is not None and place.on_command_line
        legal = f"{launched}, or leave it out" if typed else f"{launched} or --gpus {launched}, or leave it empty"
        # Which of the two was meant is not known, so neither is what the degrees should make.
        yield Finding((WORLD,), what, legal, (WORLD, DP_SHARD) if facts.shard_follows else (WORLD,))


def _world_known(facts: Facts) -> Iterator[Finding]:
    if facts.config.parallelism.data_parallel_shard_degree == -1 and facts.world is None:
        yield Finding(
            (DP_SHARD,),
            "is -1, what is left of the world, but the world is not known",
            f"set {WORLD}, give the number of processes to the launcher, or write the degree",
            (DP_SHARD,),
        )


def _product(facts: Facts) -> Iterator[Finding]:
    world = facts.world
    parallelism = facts.config.parallelism
    shard = parallelism.data_parallel_shard_degree
    rest = facts.degrees_but_shard
    if shard == -1 and world is not None and world % rest:
        narrower = _narrower(facts, world)
        yield Finding(
            (DP_SHARD, WORLD),
            f"is -1, but the world of {world}{facts.made_up_of} does not divide by the other degrees, "
            f"pp {parallelism.pipeline_parallel_degree} x dp_replicate {parallelism.data_parallel_replicate_degree} "
            f"x tp {parallelism.tensor_parallel_degree} = {rest}",
            f"{narrower}a world of {listed(multiples_near(world, rest))}{'' if narrower else ', or smaller degrees'}",
            (DP_SHARD,),
        )
    if shard != -1 and rest * shard > MOST_DEVICES:
        what = f"the degrees multiply to {rest * shard} devices, more than any lattice has"
        yield Finding((PP, DP_REPLICATE, DP_SHARD, TP), what, f"at most {MOST_DEVICES}", (PP,))
    elif shard != -1 and world is not None and rest * shard != world:
        yield Finding(
            (WORLD, DP_SHARD, TP, PP, DP_REPLICATE),
            f"the degrees multiply to {rest * shard} "
            f"(pp {parallelism.pipeline_parallel_degree} x dp_replicate {parallelism.data_parallel_replicate_degree} "
            f"x dp_shard {shard} x tp {parallelism.tensor_parallel_degree}), "
            f"the world has {world}{facts.made_up_of}{_odd_text(_odd(facts, world))}",
            _mended(facts, world),
            # Of a dp_shard that cannot follow the world nothing is known.
            (DP_SHARD,) if _would_follow(facts) else (),
        )


def _odd(facts: Facts, world: int) -> dict[str, int]:
    """Of pp and tp, which no other degree can make up for, those that do not divide the world."""
    parallelism = facts.config.parallelism
    fixed = {"pp": parallelism.pipeline_parallel_degree, "tp": parallelism.tensor_parallel_degree}
    return {name: degree for name, degree in fixed.items() if world % degree}


def _odd_text(odd: dict[str, int]) -> str:
    named = " and ".join(f"{name} {degree}" for name, degree in odd.items())
    return f", which {named} {'does' if len(odd) == 1 else 'do'} not divide" if odd else ""


def _would_follow(facts: Facts) -> bool:
    """Whether dp_shard is to be what --gpus makes of it."""
    places = facts.run_file.places
    world_said, shard_said = places.get(WORLD), places.get(DP_SHARD)
    if facts.launched not in (None, facts.config.parallelism.world_size):
        return False
    return bool(world_said and world_said.is_short and not (shard_said and shard_said.on_command_line))


def _narrower(facts: Facts, world: int) -> str:
    """Of a world too small for the other degrees the options that let dp_shard follow, with `, or `; empty of a larger.

    Each degree is a divisor of what is there, which is sure to fit the model.
    """
    parallelism = facts.config.parallelism
    degrees = {
        "--tp": parallelism.tensor_parallel_degree,
        "--pp": parallelism.pipeline_parallel_degree,
        "--dp-replicate": parallelism.data_parallel_replicate_degree,
    }
    if world >= facts.degrees_but_shard:
        return ""
    left, changed = world, {}
    for option, degree in degrees.items():
        fits = gcd(left, degree)
        left //= fits
        if fits != degree:
            changed[option] = fits
    options = [f"{option} {changed[option]}" for option in ("--pp", "--tp", "--dp-replicate") if option in changed]
    if "--pp" in changed:  # stages that the run file counts or divides itself are no more
        counted = [PER_STAGE] if changed["--pp"] > 1 else [PER_RANK, PER_STAGE]
        options += [f"{key}=null" for key in counted if facts.run_file.is_set(key)]
    return f"{' '.join(options)}, or "


def _mended(facts: Facts, world: int) -> str:
    """Which single change makes the degrees multiply to the world; with --gpus, dp_shard would have followed."""
    odd = _odd(facts, world)
    divides = [f"a {' and a '.join(odd)} that divide{'s' * (len(odd) == 1)} {world}"] if odd else []
    rest = facts.degrees_but_shard
    if _would_follow(facts) and world % rest:
        follows = f"a world of {listed(multiples_near(world, rest))}, for which dp_shard follows"
        if narrower := _narrower(facts, world):
            return narrower + follows
        return ", or ".join([*divides, follows])
    parallelism = facts.config.parallelism
    degrees = {
        "data_parallel_shard_degree": parallelism.data_parallel_shard_degree,
        "data_parallel_replicate_degree": parallelism.data_parallel_replicate_degree,
        "pipeline_parallel_degree": parallelism.pipeline_parallel_degree,
        "tensor_parallel_degree": parallelism.tensor_parallel_degree,
    }
    product = facts.degrees_but_shard * parallelism.data_parallel_shard_degree
    fits = []
    for name, degree in degrees.items():
        value, left = divmod(world * degree, product)
        # The model sets bounds to pp and tp, so only a divisor of what is there is sure to fit.
        if left == 0 and (name.startswith("data") or degree % value == 0):
            fits.append(f"{name} {value}")
    return ", or ".join([*(fits or divides), f"a world of {product}"])


RULES = (
    Rule((DP_SHARD,), _each_degree),
    *(_largest(key) for key in (WORLD, PP, DP_REPLICATE, DP_SHARD, TP)),
    Rule((WORLD,), _launched),
    Rule((DP_SHARD, WORLD), _world_known),
    Rule((PP, DP_REPLICATE, DP_SHARD, TP, WORLD), _product),
)
