"""The package keeps DESIGN's layers, and the checker that says so sees a breach of each rule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import import_rules as rules
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
KOUSHI = rules.Tree(REPOSITORY / "koushi")

Rule = Callable[[rules.Tree], list[str]]
RULES: list[Rule] = [
    rules.homeless,
    rules.upward,
    rules.entangled,
    rules.hidden,
    rules.torch_behind,
    rules.circles,
    rules.full_inits,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_koushi_keeps_the_rule(rule: Rule) -> None:
    assert len(KOUSHI.modules) > 10, "the package was not found"
    assert rule(KOUSHI) == []


def test_no_file_is_too_long() -> None:
    folders = [REPOSITORY / name for name in ("koushi", "tests", "benchmarks", "examples")]
    assert rules.too_long(*(folder for folder in folders if folder.exists())) == []


def test_modules_without_torch_are_so_when_imported() -> None:
    names = [f"koushi.{module.name}" for module in rules.without_torch(KOUSHI)]
    assert {"koushi.mesh", "koushi.check.check", "koushi.models.llama.sizes"} <= set(names)
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def made_up(folder: Path, files: dict[str, str]) -> rules.Tree:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for above in path.relative_to(folder).parents:
            (folder / above / "__init__.py").touch()
    return rules.Tree(folder)


SOUND = {
    "errors.py": "import sys\n",
    "mesh.py": "from koushi.errors import KoushiError\n",
    "models/llama/sizes.py": "from koushi import mesh\n",
    "models/llama/model.py": "import torch\n\nfrom koushi.models.llama.sizes import LlamaSize\n",
    "parallel/shards.py": "import torch\n",
    "parallel/tensor.py": "from koushi.parallel.shards import local\n",
    "parallel/compose.py": "from koushi.parallel import tensor\n",
    "cli.py": "def train():\n    from koushi.parallel.compose import parallelize\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_tree_passes(tmp_path: Path, rule: Rule) -> None:
    assert rule(made_up(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("rule", "file", "text", "violation"),
    [
        (rules.homeless, "utils.py", "", "utils: no layer holds it"),
        (rules.upward, "mesh.py", "from koushi.train.step import step", "mesh.py:1 (mesh): layer 2 imports train.step"),
        (rules.upward, "mesh.py", "from .train import step", "layer 2 imports train.step of layer 5"),
        (rules.upward, "models/llama/model.py", "from ...train import step", "layer 3 imports train.step of layer 5"),
        (rules.upward, "mesh.py", "import os\nimport koushi.train.step", "mesh.py:2 (mesh): layer 2"),
        (
            rules.entangled,
            "parallel/data.py",
            "from koushi.parallel import tensor",
            "imports the technique parallel.tensor",
        ),
        (rules.entangled, "parallel/data.py", "from .tensor import f", "imports the technique parallel.tensor"),
        (rules.entangled, "parallel/shards.py", "import koushi.parallel.tensor", "only compose.py may"),
        (rules.hidden, "mesh.py", "def f():\n    import os", "mesh.py:2 (mesh): imports os inside a function"),
        (
            rules.hidden,
            "mesh.py",
            "class A:\n    def f(self):\n        from koushi import errors",
            "imports koushi.errors inside",
        ),
        (rules.torch_behind, "job.py", "import torch.nn as nn", "job: imports torch through job"),
        (rules.torch_behind, "job.py", "from koushi.models.llama import model", "through job -> models.llama.model"),
        (rules.torch_behind, "models/other/sizes.py", "from torch import nn", "models.other.sizes: imports torch"),
        (rules.circles, "errors.py", "from koushi.mesh import MeshSpec", "errors -> mesh -> errors"),
        (rules.full_inits, "train/__init__.py", "from koushi.train.step import step", "train: its __init__.py"),
    ],
)
def test_a_breach_is_seen(tmp_path: Path, rule: Rule, file: str, text: str, violation: str) -> None:
    tree = made_up(tmp_path, SOUND | {"train/step.py": "import torch\n"} | {file: text + "\n"})
    assert len(rule(tree)) == 1
    assert violation in rule(tree)[0]


def test_an_import_for_types_only_makes_no_circle(tmp_path: Path) -> None:
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from koushi.mesh import MeshSpec\n"
    )
    tree = made_up(tmp_path, SOUND | {"errors.py": text})
    assert rules.circles(tree) == []
    assert rules.torch_behind(tree) == []
    assert rules.upward(tree) == ["errors.py:4 (errors): layer 0 imports mesh of layer 2"]


def test_a_long_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("\n" * 501)
    (tmp_path / "short.py").write_text("\n" * 500)
    assert rules.too_long(tmp_path) == ["long.py: 501 lines, 500 at most"]
