"""What is wrong with a run file, told before a command imports torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from koushi.check.check import check, check_afar
from koushi.config.load import load


def check_early(path: Path, overrides: Sequence[str], launched: bool, afar: bool = False) -> None:
    """Raises ConfigError as the command's own check will; ``launched``: whether a launcher's world counts; ``afar``:
    whether that check is ``check_afar``.

    Left to that check is what takes more than the run file: how many GPUs there are, for a degree that is left open,
    and a Hugging Face folder that a checkpoint may stand in for.
    """
    run_file = load(path, overrides)
    world = os.environ.get("WORLD_SIZE") if launched else None
    parallelism = run_file.config.parallelism
    open_degree = launched and parallelism.data_parallel_shard_degree == -1 and parallelism.world_size is None
    if run_file.is_set("model.hf") or (open_degree and world is None):
        return
    (check_afar if afar else check)(run_file, None if world is None else int(world))
