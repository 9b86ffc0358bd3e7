"""Degrees to begin with. No torch."""

from __future__ import annotations

from collections.abc import Callable

from koushi.check.model_rules import legal_tensor_degrees
from koushi.check.rule import divisors
from koushi.mesh import MeshSpec
from koushi.models.llama.flops import parameter_count
from koushi.models.llama.sizes import LlamaSize

ChooseDegrees = Callable[[LlamaSize, int], MeshSpec]
"""A mesh of so many devices for a model."""

NODE = 8
LARGE = 20e9
"""Parameters from which the matrices of one layer are cut as well."""
MOST_SHARDS = 128
"""Ranks that gather parameters from one another; more of them wait longer for smaller messages."""
MOST_STAGES = 16


def rule_of_thumb(size: LlamaSize, devices: int, node: int = NODE) -> MeshSpec:
    """A mesh of ``devices`` that is legal for the model and a fair start; what is best has to be searched.

    Sharded data parallel alone as far as it goes; for a large model tp among the ``node`` devices that a fast link
    joins; pp once data parallel grows too wide for it; for the rest whole copies.
    """
    tp = 1
    if parameter_count(size) >= LARGE:
        tp = max(degree for degree in legal_tensor_degrees(size) if node % degree == 0 and devices % degree == 0)
    left = devices // tp
    pp = 1
    while tp > 1 and left > MOST_SHARDS and left % 2 == 0 and pp < MOST_STAGES:
        pp, left = pp * 2, left // 2
    shard = max(divisors(left, MOST_SHARDS))
    if shard < NODE < left:
        shard = left  # a prime, say: better too wide than not sharded
    return MeshSpec.of(pp=pp, dp_replicate=left // shard, dp_shard=shard, tp=tp)


def fewest_devices(size: LlamaSize, memory: float = 80e9) -> int:
    """A power of two on which model state leaves three quarters of ``memory`` bytes to activations."""
    state = 16 * parameter_count(size)
    devices = 1
    while state / devices > memory / 4:
        devices *= 2
    return devices
