"""The learning rate of a step: linear warm-up, a stable part, then decay."""

from __future__ import annotations

import math

from koushi.config.schema import LrSchedule


def learning_rate(step: int, steps: int, peak: float, schedule: LrSchedule) -> float:
    """The rate of step ``step`` (from 0) of ``steps``.

    Warm-up reaches ``peak`` at its last step. Decay covers the last ``decay_fraction`` of what follows
    and ends at ``min_lr_ratio * peak`` (cosine: arXiv 1608.03983; stable then decay: arXiv 2404.06395).
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    after = steps - schedule.warmup_steps
    decay_steps = round(after * schedule.decay_fraction)
    into = step - (steps - decay_steps) + 1
    if schedule.decay == "none" or decay_steps == 0 or into <= 0:
        return peak
    progress = min(1.0, into / decay_steps)
    left = 1 - progress if schedule.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left)
