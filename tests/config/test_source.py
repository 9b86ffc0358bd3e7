"""Reading run files: values, places, and everything that is not a run file."""

from __future__ import annotations

import os
from math import isnan
from pathlib import Path

import pytest

from koushi.config.source import Tree, flow, plain, read, scalar, walk
from koushi.errors import ConfigError, Problem


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def tree_of(folder: Path, content: str | bytes) -> Tree:
    return read(write(folder, content))


def refusal(folder: Path, content: str | bytes) -> Problem:
    with pytest.raises(ConfigError) as raised:
        tree_of(folder, content)
    (problem,) = raised.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("+3", 3),
        ("0x10", 16),
        ("0o17", 15),
        ("3e-4", 3e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("1F1B", "1F1B"),
        ("2024-01-01", "2024-01-01"),
        ("*.txt", "*.txt"),
        ("a: b", "a: b"),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("1e400", float("inf")),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_nan_is_a_number() -> None:
    value = scalar(".nan")
    assert isinstance(value, float)
    assert isnan(value)


def test_very_large_integers_are_numbers() -> None:
    assert scalar("1" + "0" * 30) == 10**30 and isinstance(scalar("1" + "0" * 30), int)
    assert scalar("1" + "0" * 40) == 1e40 and isinstance(scalar("1" + "0" * 40), float)
    assert scalar("0x" + "f" * 5000) == "0x" + "f" * 5000


def test_every_key_and_value_has_its_place(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "model: {name: x}\n# a comment\ntraining:\n  lr:   3\n  list: [1,\n    two]\n")
    places = {
        key: (entry.key_place.line, entry.key_place.column, entry.place.line, entry.place.column)
        for key, entry in walk(tree.branch)
    }
    assert places == {
        "model": (1, 1, 1, 8),
        "model.name": (1, 9, 1, 15),
        "training": (3, 1, 4, 3),
        "training.lr": (4, 3, 4, 9),
        "training.list": (5, 3, 5, 9),
    }
    items = dict(walk(tree.branch))["training.list"].value
    assert isinstance(items, tuple)
    assert [(item.place.line, item.place.column) for item in items] == [(5, 10), (6, 5)]


def test_values_are_plain(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "a: {b: [1, [x, null]], c: 'no'}\nd: &one {e: true}\nf: *one\n")
    assert {key: plain(entry) for key, entry in tree.branch.items()} == {
        "a": {"b": (1, ("x", None)), "c": "no"},
        "d": {"e": True},
        "f": {"e": True},
    }


def test_the_nearest_anchor_above_counts(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "a: &x 1\nb: &x 2\nc: *x\n")
    assert plain(tree.branch["c"]) == 2


def test_a_byte_order_mark_is_not_a_character(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, b"\xef\xbb\xbfmodel: {name: x}\n")
    assert tree.branch["model"].key_place.column == 1


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        ("", "1:1", "is empty"),
        ("# only a comment\n", "1:1", "is empty"),
        ("---\n...\n", "1:1", "is empty"),
        ("null", "1:1", "is empty"),
        ("\n  just words\n", "2:3", "holds only 'just words'"),
        ("- model\n- training\n", "1:1", "holds a list"),
        ("model: [1, 2\n", "2:1", "is not valid YAML: expected ',' or ']'"),
        ("model:\n\tname: x\n", "2:1", "is not valid YAML: found character '\\t'"),
        ("a: b: c\n", "1:5", "is not valid YAML: mapping values are not allowed here"),
        ("a: 'open\n", "2:1", "is not valid YAML: found unexpected end of stream"),
        ("a: *nowhere\n", "1:4", "is not valid YAML: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2\n", "2:1", "is not valid YAML: but found another document"),
        ("a: 1\nb: x\x00y\n", "2:5", "holds the unprintable character"),
        (b"model:\n  name: caf\xe9\n", "2:12", "is not UTF-8: byte 0xe9 at offset 18 (line 2)"),
        ("model: 1\n".encode("utf-16"), "1:1", "is not UTF-8: byte 0xff at offset 0 (line 1)"),
        ("a: &x [*x]\n", "1:4", "holds itself through an alias"),
        ("[" * 1000, "1:1", "is nested too deeply"),
        ("a: " + "[" * 50 + "]" * 50, "1:24", "is nested too deeply"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)),
            "6:5",
            "is too large once aliases are written out",
        ),
    ],
)
def test_what_is_not_a_run_file_is_refused(tmp_path: Path, content: str | bytes, where: str, what: str) -> None:
    problem = refusal(tmp_path, content)
    place = problem.where.removeprefix(f"{tmp_path}/run.yaml:")
    assert problem.what.startswith(what), problem
    if not what.startswith("is too large"):
        assert place == where, problem


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "a: 1")
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / "rum.yaml")
    assert str(raised.value) == f"{tmp_path}/rum.yaml:1:1: no such file; .yaml files beside it: run.yaml"


def test_a_folder_names_the_run_files_in_it(tmp_path: Path) -> None:
    write(tmp_path, "a: 1")
    with pytest.raises(ConfigError) as raised:
        read(tmp_path)
    assert str(raised.value) == f"{tmp_path}:1:1: is a folder; name a run file in it: run.yaml"


def test_an_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read: Permission denied"):
        read(write(tmp_path, "a: 1"))


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read(Path("a\0b"))
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read(Path("a" * 5000))


def test_duplicate_keys_are_found_where_they_stand(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "a: 1\nb: {c: 1, c: 2}\na: 3\n")
    assert [(one.key, one.place.line, one.place.column) for one in tree.found] == [("b.c", 2, 11), ("a", 3, 1)]
    assert tree.found[1].what == "is written twice, first on line 1"
    assert tree.spoilt == {"a", "b.c"}


def test_two_sections_of_one_name_are_read_as_one(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, "a: {b: 1, x: 0}\na: {c: 2, x: 5}\n")
    assert plain(tree.branch["a"]) == {"b": 1, "c": 2, "x": 5}
    assert [one.key for one in tree.found] == ["a"]
    assert tree.spoilt == {"a.x"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1: x", "has a key that is not a name: 1"),
        ("? [a]\n: x", "has a key that is not a name: a list or section"),
        ("a: &a {b: 1}\nc: {<<: *a}", "merges another section with <<"),
        ("a: !!python/name:os.system x", "has the tag !!python/name:os.system"),
        ("a: !mine {b: 1}", "has the tag !mine"),
        ("a: !!set {b}", "has the tag !!set"),
    ],
)
def test_what_yaml_has_but_run_files_have_not(tmp_path: Path, text: str, what: str) -> None:
    assert [one.what for one in tree_of(tmp_path, text).found] == [what]


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    tree = tree_of(tmp_path, f"a: !!python/object/apply:os.mkdir ['{target}']\n")
    assert [one.key for one in tree.found] == ["a"]
    assert not target.exists()


def test_flow_reads_lists_sections_and_quotes() -> None:
    assert plain(flow("[1, 2e0, 'x']").branch["value"]) == (1, 2.0, "x")
    assert plain(flow("{a: {b: no}}").branch["value"]) == {"a": {"b": "no"}}
    assert plain(flow("'8'").branch["value"]) == "8"
    for wrong in ("[1", "{a: [}", "'x", "[" * 1000, "[*a]"):
        with pytest.raises(ValueError, match=r"."):
            flow(wrong)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read(path)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"# " + b"x" * (1 << 20))
    with pytest.raises(ConfigError, match="has 1048578 bytes; a run file has at most 1048576"):
        read(path)
