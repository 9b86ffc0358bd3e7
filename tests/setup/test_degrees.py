"""Degrees to begin with: legal for every model on any number of devices."""

from __future__ import annotations

import pytest

from koushi.check.model_rules import legal_tensor_degrees
from koushi.models.llama.flops import parameter_count
from koushi.models.llama.sizes import PRESETS
from koushi.setup.degrees import MOST_SHARDS, fewest_devices, rule_of_thumb

WORLDS = [1, 2, 3, 5, 6, 7, 8, 12, 24, 64, 96, 127, 131, 512, 1000, 4096, 16_384, 16_381]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", PRESETS)
def test_degrees_are_legal_and_keep_tp_inside_a_node(name: str, world: int) -> None:
    size = PRESETS[name]
    mesh = rule_of_thumb(size, world)
    assert mesh.world_size == world
    tp = mesh.degree("tp")
    assert tp in legal_tensor_degrees(size) and 8 % tp == 0
    assert rule_of_thumb(size, world, node=4).degree("tp") == min(tp, 4)
    assert mesh.degree("pp") <= min(16, size.n_layers)
    shard = mesh.degree("dp_shard")
    assert shard <= MOST_SHARDS or mesh.degree("dp_replicate") == 1


@pytest.mark.parametrize(
    ("name", "world", "degrees"),
    [
        ("llama3-debug", 1, (1, 1, 1, 1, 1)),
        ("llama3-8b", 8, (1, 1, 8, 1, 1)),
        ("llama3-8b", 1024, (1, 8, 128, 1, 1)),
        ("llama3-8b", 131, (1, 1, 131, 1, 1)),
        ("llama3-70b", 12, (1, 1, 3, 1, 4)),
        ("llama3-70b", 512, (1, 1, 64, 1, 8)),
        ("llama3-405b", 16_384, (16, 1, 128, 1, 8)),
        ("llama3-405b", 65_536, (16, 4, 128, 1, 8)),
    ],
)
def test_some_of_them(name: str, world: int, degrees: tuple[int, ...]) -> None:
    assert rule_of_thumb(PRESETS[name], world).shape == degrees


@pytest.mark.parametrize("name", PRESETS)
def test_the_fewest_devices_leave_room(name: str) -> None:
    devices = fewest_devices(PRESETS[name])
    state = 16 * parameter_count(PRESETS[name])
    assert state / devices <= 20e9
    assert devices == 1 or state / (devices / 2) > 20e9
