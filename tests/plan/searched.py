"""Jobs whose layouts are searched."""

from __future__ import annotations

from koushi.plan.layouts import Question, mesh_of
from koushi.plan.workload import Transformer, Workload


def base_of(question: Question) -> Workload:
    return Workload(
        model=Transformer.of(question.size),
        mesh=mesh_of(1, 1, 1, 1),
        stage_layers=(question.size.n_layers,),
        schedule="1F1B",
        seq_len=question.seq_len,
        microbatch_size=1,
        microbatches=question.global_batch_size,
    )
