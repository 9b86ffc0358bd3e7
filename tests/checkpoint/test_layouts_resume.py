"""A run that stopped on one layout goes on under another as if nothing had happened."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from checkpoint_runs import Layout, assert_same, checkpoint, layout, losses, rows, tensors, train


def two_microbatches(pp: int = 1, dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1, *more: str) -> Layout:
    """More would prove nothing here, and cost the most where no data-parallel rank takes a share."""
    size = 8 // (dp_replicate * dp_shard)
    return layout(pp, dp_replicate, dp_shard, tp, f"training.microbatch_size={size}", *more)


LAYOUTS: dict[str, Layout] = {
    "one": two_microbatches(),
    "tp2": two_microbatches(tp=2),
    "shard4": two_microbatches(dp_shard=4),
    "hybrid": two_microbatches(dp_replicate=2, dp_shard=2),
    "replicate2": two_microbatches(dp_replicate=2),
    "pp2": two_microbatches(pp=2),
    "pp2 zero bubble": two_microbatches(2, 1, 1, 1, "parallelism.pipeline_parallel_schedule=ZBVZeroBubble"),
    "tp4": two_microbatches(tp=4),
    "pp2 shard2 tp2": two_microbatches(pp=2, dp_shard=2, tp=2),
    "pp2 hybrid": two_microbatches(pp=2, dp_replicate=2, dp_shard=2),
}

QUICK = [
    ("one", "pp2 shard2 tp2"),
    ("pp2 shard2 tp2", "one"),
    ("hybrid", "tp4"),
    ("tp4", "hybrid"),
    ("pp2 zero bubble", "shard4"),
    ("shard4", "pp2 zero bubble"),
]
OTHERS = [pair for pair in product(LAYOUTS, repeat=2) if pair not in QUICK]
TIED = "model.tie_embeddings=true"


class Runs:
    """Ten steps under each layout, made once, with checkpoints of steps 5 and 10."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[str, Path] = {}

    def whole(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = train(self._folder / name, *LAYOUTS[name])
        return self._made[name]

    def first_half(self, name: str) -> Path:
        return checkpoint(self.whole(name), 5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def goes_on(runs: Runs, first: str, second: str, folder: Path) -> None:
    resumed = losses(train(folder, *LAYOUTS[second], source=runs.first_half(first)))
    expected = losses(runs.whole("one"))
    assert sorted(resumed) == [6, 7, 8, 9, 10]
    assert resumed == pytest.approx({step: expected[step] for step in resumed}, rel=1e-5)
    assert losses(runs.whole(first)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("first", "second"), QUICK, ids=lambda name: name.replace(" ", "-"))
def test_a_run_goes_on_under_another_layout(runs: Runs, first: str, second: str, tmp_path: Path) -> None:
    goes_on(runs, first, second, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), OTHERS)
def test_every_pair_of_layouts(runs: Runs, first: str, second: str, tmp_path: Path) -> None:
    assert len(QUICK) + len(OTHERS) == 100
    goes_on(runs, first, second, tmp_path)


@pytest.mark.parametrize("name", ["one", "pp2 shard2 tp2", "hybrid"])
def test_the_same_layout_goes_on_bit_for_bit(runs: Runs, name: str, tmp_path: Path) -> None:
    train(tmp_path, *LAYOUTS[name], source=runs.first_half(name))
    assert_same(checkpoint(tmp_path, 10), checkpoint(runs.whole(name), 10))
    whole, resumed = ({row["step"]: row for row in rows(one)} for one in (runs.whole(name), tmp_path))
    for step, row in resumed.items():
        for figure in ("loss", "grad_norm", "lr", "samples", "valid_tokens"):
            assert row[figure] == whole[step][figure], (step, figure)


@pytest.mark.parametrize("first", ["one", "pp2 hybrid", "shard4"])
def test_a_checkpoint_holds_the_unsharded_model(runs: Runs, first: str) -> None:
    found = tensors(runs.first_half(first))
    expected = tensors(runs.first_half("one"))
    assert found.keys() == expected.keys()
    assert found["parameter/layers.0.attention.wq.weight"].shape == (24, 24)
    for key, value in found.items():
        assert value.shape == expected[key].shape
        assert (value - expected[key]).norm() <= 1e-3 * expected[key].norm(), key


def test_tied_weights_are_stored_once_and_held_by_both_ends(tmp_path: Path) -> None:
    alone = losses(train(tmp_path / "one", *LAYOUTS["one"], TIED))
    stages = train(tmp_path / "pp2", *LAYOUTS["pp2"], TIED)
    assert "parameter/output.weight" not in tensors(checkpoint(stages, 5))
    for name, source in (("pp2", "one"), ("one", "pp2")):
        folder = tmp_path / f"{name} from {source}"
        resumed = losses(train(folder, *LAYOUTS[name], TIED, source=checkpoint(tmp_path / source, 5)))
        assert resumed == pytest.approx({step: alone[step] for step in resumed}, rel=1e-5)
        assert len(resumed) == 5
