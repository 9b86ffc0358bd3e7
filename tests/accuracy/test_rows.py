"""Files of runs are read whatever their cells hold, and refused by name where they are no such files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from click.testing import CliRunner
from published_rows import LLAMA_8B, row

from koushi.accuracy.__main__ import main
from koushi.accuracy.rows import FAILED, MEASURED, Row, RowsError, read


def test_cells_become_numbers() -> None:
    found = row(nodes_gpus_per_node="2x8", moe="True", sp="False", zero_stage="0", tokens_per_s_per_gpu="1,633.5")
    assert (found.layers, found.gpus_per_node, found.zero_stage) == (32, 8, 0)
    assert (found.moe, found.sequence_parallel, found.compiled) == (True, False, None)
    assert found.tokens_per_s == 1633.5


@pytest.mark.parametrize("cell", ["", "?", "12.5", "-3", "0", "nan", "inf", "eight", "1e308"])
def test_what_is_no_count_is_missing(cell: str) -> None:
    assert row(gpus=cell).gpus is None


@pytest.mark.parametrize("cell", ["", "n/a", "-1", "0", "nan", "inf", "1e308", "1e-308"])
def test_what_is_no_amount_is_missing(cell: str) -> None:
    assert row(peak_mem_gib=cell).memory_gib is None


def test_columns_that_are_not_there_are_missing_cells() -> None:
    found = Row.of({"source": "a", "model": "b"})
    assert found.source == "a"
    assert found.tokens_per_s is None and found.tp is None and found.notes == ""


def test_plain_and_gzipped_files_are_alike(tmp_path: Path) -> None:
    text = ",".join(LLAMA_8B) + "\n" + ",".join(LLAMA_8B.values()) + "\n"
    (tmp_path / "runs.csv").write_text(text, encoding="utf-8")
    (tmp_path / "runs.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "runs.csv") == read(tmp_path / "runs.csv.gz") == (row(),)


def test_a_file_of_something_else_is_refused_by_its_columns(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("name,value\na,1\n", encoding="utf-8")
    with pytest.raises(RowsError, match=r"other\.csv has no column source, model, gpu, seq_len, micro_batch"):
        read(tmp_path / "other.csv")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.csv.gz").write_bytes(b"not gzip")
    with pytest.raises(RowsError, match="cannot be read"):
        read(tmp_path / "runs.csv.gz")


HEADER = "source,model,gpu,seq_len,micro_batch\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEADER + "a,b,h100,1,1,extra\n", "row 1 has more cells than the header"),
        (HEADER + 'a,"b"c,h100,1,1\n', "is no CSV"),
        (HEADER + "a,b,h100,1," + "1" * 200_000 + "\n", "is no CSV"),
    ],
)
def test_damaged_rows_are_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "runs.csv").write_text(text, encoding="utf-8")
    with pytest.raises(RowsError, match=told) as caught:
        read(tmp_path / "runs.csv")
    assert "\n" not in str(caught.value)


def test_stray_carriage_returns_end_rows(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes((HEADER + "a,b\rc,h100,1,1\n").encode())
    assert [one.source for one in read(tmp_path / "runs.csv")] == ["a", "c"]


def test_a_source_that_is_not_there_is_answered_with_those_that_are() -> None:
    found = CliRunner().invoke(main, ["--source", "nosuch"])
    assert found.exit_code == 2 and "no source is called 'nosuch'; they are " in found.output


def test_shipped_files_are_whole() -> None:
    assert (len(read(MEASURED)), len(read(FAILED))) == (2171, 1385)
