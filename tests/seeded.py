"""Faults of the real step that several tests seed. Ranks are forked, so what a test patches is patched there."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from koushi.parallel import data

Patch = pytest.MonkeyPatch


def averaged(patch: Patch) -> None:
    """Gradients are averaged over data parallel, although the loss is divided already."""
    original = data.apply

    def apply(module: Any, submesh: Any, *rest: Any) -> Any:
        applied = original(module, submesh, *rest)
        for sharded in applied.modules():
            if isinstance(sharded, FSDPModule):
                sharded.set_gradient_divide_factor(float(submesh.size()))
        return applied

    patch.setattr(data, "apply", apply)
