"""DESIGN's rules on who may import whom, read from the source with ``ast``.

Every rule is a function from a Tree to the violations it finds, as sentences.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "koushi"

LAYERS: dict[int, tuple[str, ...]] = {
    0: ("errors", "units", "output", "signals"),
    1: ("config",),
    2: ("mesh", "layout", "schedules", "traffic", "hardware"),
    3: ("models", "data", "optim", "loss", "plan", "job", "run_folder", "check"),
    4: ("parallel", "checkpoint"),
    5: ("train",),
    6: ("verify", "dryrun", "report", "setup", "generate", "accuracy", "calibrate"),
    7: ("commands", "cli", "__main__"),
}
"""The parts of the package, the first piece of a module's name, by layer."""

TECHNIQUES = ("tensor", "pipeline", "data", "context", "expert", "recompute", "precision", "compile")
"""Files of parallel/ that only its compose.py may import from within parallel/."""

WITHOUT_TORCH = (
    "errors",
    "units",
    "output",
    "signals",
    "config",
    "mesh",
    "layout",
    "schedules",
    "traffic",
    "hardware",
    "plan",
    "job",
    "run_folder",
    "check",
    "accuracy",
    "report",
    "setup",
)
"""Parts that import no torch, and nothing that does; besides them the files below of every model."""
MODEL_FILES_WITHOUT_TORCH = ("sizes", "layout", "hf", "hf_folder")
CHECKPOINT_FILES_WITHOUT_TORCH = ("files", "folders", "inspect", "manifest", "newest")

LAZY = ("cli", "commands")
"""Parts that import what a command runs only when it runs."""

LONGEST = 500


@dataclass(frozen=True)
class Import:
    """One import statement's module, absolute."""

    target: str
    line: int
    in_function: bool
    for_types_only: bool


@dataclass(frozen=True)
class Module:
    name: str
    """Below the package: ``parallel.tensor``; a package's __init__ has the package's name, the root's is empty."""
    path: Path
    imports: tuple[Import, ...]

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    def at(self, line: int) -> str:
        return f"{self.path.name}:{line} ({self.name})"


@dataclass(frozen=True)
class Tree:
    """A package's modules by name."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        names = {self._name(path): path for path in sorted(self.root.rglob("*.py"))}
        return {name: Module(name, path, tuple(imports(name, path, names))) for name, path in names.items()}

    def _name(self, path: Path) -> str:
        pieces = path.relative_to(self.root).with_suffix("").parts
        return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)

    def inner(self, module: Module) -> Iterator[tuple[Import, Module]]:
        """What ``module`` imports from the package itself, at run time or for types."""
        for each in module.imports:
            if each.target == PACKAGE or each.target.startswith(PACKAGE + "."):
                name = each.target[len(PACKAGE) + 1 :]
                if name in self.modules:
                    yield each, self.modules[name]


def imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """Every import in a file; ``from package import module`` counts as one of the module."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    functions, types_only = spans(tree)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        place = (
            node.lineno,
            any(node.lineno in span for span in functions),
            any(node.lineno in span for span in types_only),
        )
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, *place) for alias in node.names)
            continue
        base = absolute(name, path, node)
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            yield Import(whole if whole[len(PACKAGE) + 1 :] in modules else base, *place)


def spans(tree: ast.Module) -> tuple[list[range], list[range]]:
    """Lines inside functions, and lines inside ``if TYPE_CHECKING``."""
    functions, types_only = [], []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            functions.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            types_only.append(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1))
    return functions, types_only


def absolute(name: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    pieces = [PACKAGE, *(name.split(".") if name else [])]
    above = node.level - 1 if path.name == "__init__.py" else node.level
    return ".".join(pieces[: len(pieces) - above] + ([node.module] if node.module else []))


def layer(module: Module) -> int | None:
    return next((number for number, parts in LAYERS.items() if module.part in parts), None)


def homeless(tree: Tree) -> list[str]:
    """Modules that stand in no layer."""
    return [
        f"{name}: no layer holds it; see LAYERS" for name, each in tree.modules.items() if name and layer(each) is None
    ]


def upward(tree: Tree) -> list[str]:
    """Imports from a higher layer."""
    found = []
    for module in tree.modules.values():
        for each, target in tree.inner(module):
            here, there = layer(module), layer(target)
            if here is not None and there is not None and there > here:
                found.append(f"{module.at(each.line)}: layer {here} imports {target.name} of layer {there}")
    return found


def entangled(tree: Tree) -> list[str]:
    """Imports of a technique by any file of parallel/ but compose.py."""
    techniques = {f"parallel.{name}" for name in TECHNIQUES}
    found = []
    for module in tree.modules.values():
        if module.part != "parallel" or module.name == "parallel.compose":
            continue
        for each, target in tree.inner(module):
            if technique(target.name, techniques) not in {None, technique(module.name, techniques)}:
                found.append(f"{module.at(each.line)}: imports the technique {target.name}; only compose.py may")
    return found


def technique(name: str, techniques: set[str]) -> str | None:
    """The technique that a module is, or is a file of."""
    return next((each for each in techniques if name == each or name.startswith(each + ".")), None)


def hidden(tree: Tree) -> list[str]:
    """Imports inside a function, but for the command line's."""
    return [
        f"{module.at(each.line)}: imports {each.target} inside a function; only cli.py and commands/ may"
        for module in tree.modules.values()
        for each in module.imports
        if each.in_function and module.part not in LAZY
    ]


def without_torch(tree: Tree) -> list[Module]:
    """The modules that must not import torch."""
    return [
        module
        for module in tree.modules.values()
        if module.part in WITHOUT_TORCH
        or (module.part == "models" and module.name.split(".")[-1] in MODEL_FILES_WITHOUT_TORCH)
        or (module.part == "checkpoint" and module.name.split(".")[-1] in CHECKPOINT_FILES_WITHOUT_TORCH)
    ]


def torch_behind(tree: Tree) -> list[str]:
    """Modules that must not import torch and do, themselves or through another."""
    found = []
    for module in without_torch(tree):
        way = way_to_torch(tree, module)
        if way:
            found.append(f"{module.name}: imports torch through {' -> '.join(way)}")
    return found


def way_to_torch(tree: Tree, module: Module) -> tuple[str, ...]:
    """The shortest chain of modules from ``module`` to one that imports torch; empty if there is none."""
    ways = {module.name: (module.name,)}
    waiting = deque([module])
    while waiting:
        here = waiting.popleft()
        if any(each.target.split(".")[0] == "torch" and not each.for_types_only for each in here.imports):
            return ways[here.name]
        for each, target in tree.inner(here):
            if not each.for_types_only and target.name not in ways:
                ways[target.name] = (*ways[here.name], target.name)
                waiting.append(target)
    return ()


def circles(tree: Tree) -> list[str]:
    """Modules that import each other in a circle, each circle named once."""
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(module: Module, way: tuple[str, ...]) -> None:
        if module.name in way:
            circle = way[way.index(module.name) :]
            found.setdefault(frozenset(circle), " -> ".join((*circle, module.name)))
        elif module.name not in done:
            for each, target in tree.inner(module):
                if not each.for_types_only and target.name != module.name:
                    visit(target, (*way, module.name))
            done.add(module.name)

    for module in tree.modules.values():
        visit(module, ())
    return sorted(found.values())


def full_inits(tree: Tree) -> list[str]:
    """__init__ files with anything in them, but for the package's own with its version."""
    return [
        f"{name}: its __init__.py is not empty"
        for name, module in tree.modules.items()
        if name and module.path.name == "__init__.py" and module.path.read_text(encoding="utf-8").strip()
    ]


def too_long(*folders: Path) -> list[str]:
    """Python files of more than LONGEST lines."""
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
    return [f"{path.name}: {length} lines, {LONGEST} at most" for path, length in lengths.items() if length > LONGEST]
