"""``koushi plan`` as tests call it, and a run file for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from koushi.check.check import check
from koushi.cli import main
from koushi.config.load import load
from koushi.plan.command import hardware_of
from koushi.plan.plan import Plan, plan
from koushi.plan.workload import of_job

SMALL = """\
# A small model, with a comment to keep.
model: {n_layers: 4}
parallelism:
  data_parallel_shard_degree: 4   # of 4
training: {seq_len: 256, global_batch_size: 32, microbatch_size: 4}
run: {hardware: h100-sxm-80gb}
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def planned(path: Path, *overrides: str) -> Plan:
    job = check(load(path, overrides))
    return plan(of_job(job), hardware_of(job))
