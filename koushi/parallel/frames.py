"""Where in the code a collective comes from, read from the stack of the thread that issues it.

What is looked for in torch by its code object is private, and kept in this one place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.schedules import _batch_p2p, _PipelineSchedule

from koushi.parallel import arrivals, collectives

TORCH = str(Path(torch.__file__).parent)
PASSED_OVER = frozenset({__file__, str(Path(__file__).with_name("ledger.py")), arrivals.__file__, collectives.__file__})
"""Whoever called these is of interest."""
ABOVE = Path(__file__).parents[2]
"""The folder that the package lies in."""


def _code(function: Callable[..., Any]) -> CodeType:
    found = inspect.unwrap(function)
    assert inspect.isfunction(found), f"{function} is no longer a Python function"
    return found.__code__


GATHERING = (_code(FSDPParamGroup.unshard), _code(FSDPParamGroup.wait_for_unshard))
REDUCING = (_code(FSDPParamGroup.post_backward), _code(FSDPParamGroup.finalize_backward))
"""Part of backward also where pipelining or FSDP runs it when autograd is through."""
EXCHANGING = _code(_batch_p2p)
GREETING = _code(_PipelineSchedule._warmup_p2p)
_SOUGHT = {id(code): code for code in (*GATHERING, *REDUCING, EXCHANGING, GREETING)}
"""By identity: the hash of a code object goes through all of it."""


@dataclass(frozen=True, order=True)
class Site:
    """A line of the caller's code."""

    file: str
    """Koushi's own from the package on, such as ``koushi/train/step.py``."""
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Caller:
    site: Site
    sharded: nn.Module | None
    """Whose parameters FSDP gathers, or whose gradients it reduces."""
    reduces_gradients: bool
    in_pipeline: bool
    """Whether torch's pipeline schedule itself exchanges with another stage."""
    greets: bool
    """Whether pipeline stages only make each other's acquaintance, as they do once."""


def caller() -> Caller:
    """Who has called the collective that is just being recorded."""
    site: Site | None = None
    sharded: nn.Module | None = None
    reduces = in_pipeline = greets = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if id(code) in _SOUGHT:
            if code is EXCHANGING:
                in_pipeline = True
            elif code is GREETING:
                greets = True
            elif sharded is None:
                sharded = frame.f_locals["self"].modules[0]
                reduces = code in REDUCING
        if site is None and not code.co_filename.startswith(TORCH) and code.co_filename not in PASSED_OVER:
            site = Site(_short(code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return Caller(site or Site("?", 0), sharded, reduces, in_pipeline, greets)


@cache
def _short(file: str) -> str:
    path = Path(file)
    return path.relative_to(ABOVE).as_posix() if path.is_relative_to(ABOVE) else file
