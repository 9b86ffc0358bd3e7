"""Rules on pipeline parallel: stages, layers, and what its schedules ask for."""

from __future__ import annotations

from collections.abc import Iterator

from koushi.check.rule import (
    COMPILE,
    DP_REPLICATE,
    DP_SHARD,
    GLOBAL_BATCH,
    LAYERS,
    MICROBATCH,
    NAME,
    PER_RANK,
    PER_STAGE,
    PP,
    RESHARD,
    SCHEDULE,
    Facts,
    Finding,
    Rule,
    listed,
)
from koushi.schedules import SCHEDULES, microbatches_fit, nearest_microbatches
from koushi.units import counted


def _without_pipeline(facts: Facts) -> Iterator[Finding]:
    parallelism = facts.config.parallelism
    if facts.pp > 1:
        return
    legal = f"leave it empty, or set {PP} above 1"
    if (parallelism.pipeline_parallel_stages_per_rank or 1) > 1:
        what = f"is {parallelism.pipeline_parallel_stages_per_rank}, but there is no pipeline to divide"
        yield Finding((PER_RANK,), what, legal)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        yield Finding((PER_STAGE,), "is set, but there is no pipeline to divide", legal)


def _stages_per_rank(facts: Facts) -> Iterator[Finding]:
    if facts.pp == 1:
        return
    name = facts.config.parallelism.pipeline_parallel_schedule
    needs = SCHEDULES[name]
    fewest, most = needs.fewest_stages_per_rank, needs.most_stages_per_rank
    given = facts.stages_per_rank
    if given < fewest or (most is not None and given > most):
        needed = f"at least {fewest}" if most is None else f"exactly {fewest}"
        fitting = [
            other
            for other, need in SCHEDULES.items()
            if need.fewest_stages_per_rank <= given <= (need.most_stages_per_rank or given)
        ]
        yield Finding(
            (PER_RANK, SCHEDULE),
            f"is {given}, but {name} needs {needed}",
            f"{needed}, or a schedule for {given}: {', '.join(fitting)}",
            (PER_RANK,),
        )


def _enough_layers(facts: Facts) -> Iterator[Finding]:
    if facts.pp == 1 or facts.config.parallelism.pipeline_parallel_layers_per_stage is not None:
        return
    layers, stages = facts.size.n_layers, facts.n_stages
    if layers < stages:
        per_rank = facts.stages_per_rank
        most = layers // per_rank
        few = f"{counted(layers, 'layer')} {'is' if layers == 1 else 'are'}"
        legal = f"a pipeline_parallel_degree of at most {most}" if most > 1 else f"at least {stages} layers"
        yield Finding(
            (PP, LAYERS, PER_RANK),
            f"{few} fewer than {stages} stages ({facts.pp} ranks x {per_rank})",
            f"{legal}, or {PER_STAGE} with empty first and last stages",
        )


def _layers_per_stage(facts: Facts) -> Iterator[Finding]:
    given = facts.config.parallelism.pipeline_parallel_layers_per_stage
    if facts.pp == 1 or given is None:
        return
    if len(given) != facts.n_stages:
        what = f"has {len(given)} entries for {facts.n_stages} stages ({facts.pp} ranks x {facts.stages_per_rank})"
        yield Finding((PER_STAGE,), what, f"{facts.n_stages} entries")
    if empty := [stage for stage, layers in enumerate(given) if layers == 0 and 0 < stage < len(given) - 1]:
        legal = "at least 1 layer (only the first and the last stage may have 0: they hold embedding and output)"
        yield Finding((PER_STAGE,), f"leaves stage {listed(empty)} without layers", legal)


def _layers_add_up(facts: Facts) -> Iterator[Finding]:
    given = facts.config.parallelism.pipeline_parallel_layers_per_stage
    if facts.pp > 1 and given is not None and sum(given) != facts.size.n_layers:
        what = f"adds up to {sum(given)} layers, the model has {facts.size.n_layers}"
        yield Finding((PER_STAGE,), what, f"entries that add up to {facts.size.n_layers}")


def _microbatches(facts: Facts) -> Iterator[Finding]:
    training = facts.config.training
    unit = facts.data_parallel * training.microbatch_size
    if facts.pp == 1 or training.global_batch_size % unit:
        return
    name, count = facts.config.parallelism.pipeline_parallel_schedule, training.global_batch_size // unit
    if microbatches_fit(name, facts.pp, facts.n_stages, count):
        return
    legal = nearest_microbatches(name, facts.pp, facts.n_stages, count)
    if SCHEDULES[name].in_rounds:
        rounds = count // facts.pp
        reason = f"needs them to divide into {rounds} rounds of about {facts.pp}"
    else:
        reason = f"needs at least as many as there are stages, {facts.n_stages}"
    batches = listed(one * unit for one in legal)
    yield Finding(
        (GLOBAL_BATCH, MICROBATCH, SCHEDULE, PP),
        f"makes {counted(count, 'microbatch')}, but {name} {reason}",
        f"{listed(legal)} microbatches, as with a global_batch_size of {batches} at this microbatch_size",
    )


def _reshard(facts: Facts) -> Iterator[Finding]:
    if facts.pp == 1 or facts.config.parallelism.reshard_after_forward != "always":
        return
    name = facts.config.parallelism.pipeline_parallel_schedule
    if SCHEDULES[name].splits_backward:
        reason = f"torch computes wrong gradients under {name} when parameters are resharded"
    else:
        reason = "every microbatch would gather the parameters again"
    yield Finding((RESHARD,), f"is always, but under pipelining {reason}", "auto or never")


def _whole_backward() -> list[str]:
    return [name for name, needs in SCHEDULES.items() if not needs.splits_backward]


def _compile(facts: Facts) -> Iterator[Finding]:
    name = facts.config.parallelism.pipeline_parallel_schedule
    if facts.pp > 1 and facts.config.training.compile and SCHEDULES[name].splits_backward:
        what = f"is true, but {name} splits backward in two, which torch cannot do in compiled blocks"
        yield Finding((COMPILE, SCHEDULE), what, f"false, or a schedule of {', '.join(_whole_backward())}")


_STAGES = (PP, SCHEDULE, PER_RANK)

RULES = (
    Rule((PP, PER_RANK, PER_STAGE), _without_pipeline),
    Rule(_STAGES, _stages_per_rank),
    Rule((NAME, LAYERS, PER_STAGE, *_STAGES), _enough_layers),
    Rule((PER_STAGE, *_STAGES), _layers_per_stage),
    Rule((NAME, LAYERS, PER_STAGE, PP), _layers_add_up),
    Rule((GLOBAL_BATCH, MICROBATCH, DP_REPLICATE, DP_SHARD, *_STAGES), _microbatches),
    Rule((PP, SCHEDULE, RESHARD), _reshard),
    Rule((PP, SCHEDULE, COMPILE), _compile),
)
