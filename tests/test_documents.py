"""The READMEs say what is so: their commands, run files, code and links work, and the two are twins."""

from __future__ import annotations

import doctest
import json
import re
import shlex
import shutil
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import save_file

from koushi.check.check import check
from koushi.cli import commands, main
from koushi.config.load import load
from koushi.config.overrides import split_run_path
from koushi.job import Job
from koushi.mesh import MeshSpec
from koushi.models.llama.hf import config_of, hf_shapes
from koushi.models.llama.sizes import PRESETS
from koushi.train.launch import launch

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README.ja.md")
DOCUMENTS = (*READMES, "CONTRIBUTING.md", "CHANGELOG.md", "docs/log.md")
PLACEHOLDER = "run.yaml"
"""The reader's own run file; it has the layout of the 128 devices."""
SHELL = {"sbatch", "make", "koushi", "torchrun", ".venv/bin/python"}
"""What a command in a document may begin with."""

anything = pytest.mark.parametrize("document", DOCUMENTS)
readme = pytest.mark.parametrize("document", READMES)


@dataclass(frozen=True)
class Block:
    kind: str
    text: str


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, *kinds: str) -> list[Block]:
    found = [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", text_of(document), re.S | re.M)]
    return [block for block in found if not kinds or block.kind in kinds]


def prose(document: str) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.S | re.M)


def command_lines(document: str) -> list[str]:
    """Every command in the code blocks, without prompts and comments."""
    found = []
    for block in blocks(document, "bash", "console"):
        for line in block.text.splitlines():
            if block.kind == "console" and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ").strip()
            if line and not line.startswith("#"):
                found.append(line)
    return found


def koushi_arguments(line: str) -> list[str] | None:
    """What follows ``koushi``, also where torchrun starts it, without a redirection; None for other commands."""
    words = shlex.split(line.partition(" > ")[0])
    if words[0] == "koushi":
        return words[1:]
    for first, second in pairwise(words):
        if (first, second) == ("-m", "koushi"):
            return words[words.index("-m") + 2 :]
    return None


def hugging_face_folder(folder: Path) -> None:
    size = replace(PRESETS["llama3-debug"], dim=32, n_layers=2, ffn_dim=32)
    folder.mkdir(parents=True)
    config = config_of(size, dtype="bfloat16", max_seq_len=256, begin_id=None, end_id=1)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in hf_shapes(size).items()}
    save_file(zeros, folder / "model.safetensors")
    shutil.copy(ROOT / "koushi" / "data" / "tokenizer.json", folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the README's reader has: the examples, and files that its run files name."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "koushi" / "data" / "tokenizer.json", tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.jsonl").write_text('{"text": "a document"}\n', encoding="utf-8")
    hugging_face_folder(tmp_path / "models" / "tiny")
    for index, block in enumerate(blocks("README.md", "yaml")):
        named = re.match(r"# (\S+\.yaml)\n", block.text)
        (tmp_path / (named[1] if named else f"{index}.yaml")).write_text(block.text, encoding="utf-8")
    shutil.copy(ROOT / "examples" / "llama_128.yaml", tmp_path / PLACEHOLDER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@anything
def test_every_command_is_one_we_know(document: str) -> None:
    unknown = [line for line in command_lines(document) if line.split()[0] not in SHELL]
    assert not unknown
    assert bool(command_lines(document)) is (document not in ("CHANGELOG.md", "docs/log.md"))


@anything
def test_make_targets_are_there(document: str) -> None:
    makefile = text_of("Makefile")
    named = re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join([*command_lines(document), prose(document)]), re.M)
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.M)] == []


@anything
def test_files_that_python_commands_name_are_there(document: str) -> None:
    for line in command_lines(document):
        if line.startswith(".venv/bin/python"):
            named = [word for word in line.split()[1:] if "/" in word]
            assert [word for word in named if not (ROOT / word).exists()] == [], line


@readme
def test_koushi_commands_are_accepted(document: str, here: Path) -> None:
    seen = set()
    for line in command_lines(document):
        arguments = koushi_arguments(line)
        if arguments is None:
            continue
        name, *rest = arguments
        seen.add(name)
        command = commands.commands[name]
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        context = command.make_context(name, list(rest), resilient_parsing=False)
        if "arguments" not in context.params or context.params.get("schema"):
            continue
        run_path, overrides = split_run_path(context.params["arguments"])
        assert run_path is not None, line
        if run_path != "wrong.yaml":
            check(load(here / run_path, overrides), context.params.get("world"))
    assert seen == set(commands.commands)


@readme
def test_checks_print_what_is_shown(document: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = 0
    for block in blocks(document, "console"):
        line, _, output = block.text.partition("\n")
        if not line.startswith(("$ koushi check", "$ koushi mesh")):
            continue
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[2:])
        printed = capsys.readouterr()
        assert printed.out + printed.err == output
        assert ended.value.code == (2 if "wrong" in line else 0)
        shown += 1
    assert shown == 3


@readme
def test_plans_print_what_is_shown(document: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = 0
    for block in blocks(document, "console"):
        line, _, output = block.text.partition("\n")
        if not line.startswith("$ koushi plan"):
            continue
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[2:])
        printed = capsys.readouterr()
        assert (ended.value.code, printed.err) == (0, "")
        parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", output, flags=re.M)]
        assert re.fullmatch(r"(?:.*\n)+".join(parts), printed.out), printed.out
        shown += 1
    assert shown == 2


@readme
def test_run_files_are_accepted(document: str, here: Path) -> None:
    accepted = [block for block in blocks(document, "yaml") if not block.text.startswith("# wrong.yaml")]
    assert len(accepted) == len(blocks(document, "yaml")) - 1 >= 3
    for block in accepted:
        path = here / "block.yaml"
        path.write_text(block.text, encoding="utf-8")
        check(load(path))


@readme
def test_the_picture_of_the_lattice_is_right(document: str) -> None:
    rows = [row.split() for row in re.findall(r"dp_shard=(\d(?: +\d+){16})$", text_of(document), re.M)]
    mesh = MeshSpec.of(pp=2, dp_replicate=2, dp_shard=4, tp=8)
    expected = [(first, *mesh.groups("tp")[first], *mesh.groups("tp")[first + 8]) for first in range(8)]
    assert [tuple(map(int, row)) for row in rows] == [(first % 4, *ranks) for first, *ranks in expected]


@readme
def test_examples_for_the_prompt_give_what_is_shown(document: str) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    found = blocks(document, "pycon")
    assert found
    for block in found:
        assert runner.run(parser.get_doctest(block.text, {}, document, document, 0)).failed == 0


def run_snippet(job: Job, *, code: str, folder: Path) -> None:
    """Worker: a README's script as torchrun would run it, its output kept."""
    lines: list[str] = []
    exec(code, {"print": lambda *values: lines.append(" ".join(map(str, values))), "__name__": "__main__"})
    if lines:
        (folder / "output.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.long
def test_the_script_that_cuts_a_model_prints_what_is_shown(here: Path) -> None:
    (script,) = blocks("README.md", "python")
    (shown,) = [block.text for block in blocks("README.md", "console") if "lattice.py" in block.text]
    job = check(load(here / "examples" / "debug.yaml", ["run.device=cpu"]))
    launch(partial(run_snippet, code=script.text, folder=here), job)
    assert (here / "output.txt").read_text(encoding="utf-8") == shown.partition("\n")[2]


def test_the_readmes_are_twins() -> None:
    english, japanese = (text_of(document) for document in READMES)
    levels = [re.findall(r"^#+ ", prose(document), re.M) for document in READMES]
    assert levels[0] == levels[1]
    assert len(levels[0]) > 10
    assert blocks("README.md") == blocks("README.ja.md")
    rows = [re.findall(r"^\|", text, re.M) for text in (english, japanese)]
    items = [re.findall(r"^- ", text, re.M) for text in (english, japanese)]
    assert (len(rows[0]), len(items[0])) == (len(rows[1]), len(items[1]))


@anything
def test_links_lead_somewhere(document: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", prose(document))
    missing = [one for one in targets if "://" not in one and not ((ROOT / document).parent / one).exists()]
    assert missing == []


@anything
def test_links_within_a_document_lead_to_a_heading(document: str) -> None:
    """As GitHub names headings."""
    text = prose(document)
    headings = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in re.findall(r"(?m)^#+ (.+)$", text)}
    assert set(re.findall(r"\]\(#([^)\s]+)\)", text)) - headings == set()


@anything
def test_files_named_in_code_are_there(document: str) -> None:
    names = re.findall(r"`((?:koushi|tests|examples|benchmarks)/[\w./]*)`", prose(document))
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_a_wrong_command_is_seen() -> None:
    assert koushi_arguments("koushi trian x.yaml") == ["trian", "x.yaml"]
    assert koushi_arguments("srun torchrun --nnodes 2 -m koushi train run.yaml") == ["train", "run.yaml"]
    assert koushi_arguments("torchrun --nproc-per-node 8 lattice.py") is None
    with pytest.raises(click.UsageError):
        commands.commands["verify"].make_context("verify", ["--steps", "none", "x.yaml"])
