"""Published runs as they stand in a CSV file. No torch.

Every cell may be empty or hold something that is no number; what a row lacks is None here, and
``published`` decides whether it can do without.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from koushi.errors import KoushiError

DATA = Path(__file__).parent / "data"
MEASURED = DATA / "measured_runs.csv.gz"
FAILED = DATA / "failed_runs.csv.gz"

NEEDED = ("source", "model", "gpu", "seq_len", "micro_batch")
"""Columns that a file must have for its rows to mean anything."""


SMALLEST, LARGEST = 1e-9, 1e12
"""Of an amount, whatever its unit; a cell beyond says nothing."""
MOST = 10_000_000
"""Of a count."""


class RowsError(KoushiError):
    """A file of runs that cannot be read."""

    exit_code = 2


@dataclass(frozen=True)
class Row:
    """One run. Counts are whole numbers, rates are per GPU, memory is in GiB; None where nothing is stated."""

    id: str
    source: str
    origin: str
    """Where the row was published: a page, or one commit's message."""
    model: str
    gpu: str
    date: str
    """``2024-08``."""
    notes: str
    precision: str
    recompute: str
    schedule: str
    layers: int | None
    dim: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    gpus: int | None
    gpus_per_node: int | None
    dp_replicate: int | None
    dp_shard: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    ep: int | None
    zero_stage: int | None
    micro_batch: int | None
    global_batch: int | None
    sequence_parallel: bool | None
    compiled: bool | None
    moe: bool
    params_b: float | None
    tokens_per_s: float | None
    tflops: float | None
    mfu_pct: float | None
    step_seconds: float | None
    memory_gib: float | None

    @classmethod
    def of(cls, cells: Mapping[str, str | None]) -> Row:
        def text(name: str) -> str:
            return (cells.get(name) or "").strip()

        return cls(
            id=text("row_id"),
            source=text("source"),
            origin=text("source_url_or_path"),
            model=text("model"),
            gpu=text("gpu").lower(),
            date=text("date"),
            notes=text("notes"),
            precision=text("precision").lower(),
            recompute=text("activation_ckpt").lower(),
            schedule=text("vpp_schedule"),
            layers=_count(text("layers")),
            dim=_count(text("hidden")),
            ffn=_count(text("ffn")),
            heads=_count(text("heads")),
            kv_heads=_count(text("kv_heads")),
            vocab=_count(text("vocab")),
            seq_len=_count(text("seq_len")),
            gpus=_count(text("gpus")),
            gpus_per_node=_count(text("nodes_gpus_per_node").partition("x")[2]),
            dp_replicate=_count(text("dp_replicate")),
            dp_shard=_count(text("dp_shard")),
            tp=_count(text("tp")),
            pp=_count(text("pp")),
            cp=_count(text("cp")),
            ep=_count(text("ep")),
            zero_stage=_count(text("zero_stage"), least=0),
            micro_batch=_count(text("micro_batch")),
            global_batch=_count(text("global_batch")),
            sequence_parallel=_flag(text("sp")),
            compiled=_flag(text("compile")),
            moe=bool(_flag(text("moe"))),
            params_b=_number(text("params_b")),
            tokens_per_s=_number(text("tokens_per_s_per_gpu")) or _number(text("derived_tps_per_gpu")),
            tflops=_number(text("tflops_per_gpu")),
            mfu_pct=_number(text("mfu_pct")),
            step_seconds=_number(text("step_time_s")) or _number(text("derived_step_time_s")),
            memory_gib=_number(text("peak_mem_gib")),
        )


def _number(text: str) -> float | None:
    """A number above zero, or None."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if SMALLEST <= value <= LARGEST else None


def _count(text: str, least: int = 1) -> int | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() and least <= value <= MOST else None


def _flag(text: str) -> bool | None:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower())


def read(path: Path) -> tuple[Row, ...]:
    """The rows of a CSV file, gzipped or plain. Raises RowsError."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RowsError(f"{path} cannot be read: {error}") from None
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names, rows = table.fieldnames or (), list(table)
    except csv.Error as error:
        raise RowsError(f"{path}:{table.line_num}: is no CSV: {error}") from None
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise RowsError(f"{path} has no column {', '.join(missing)}; it needs at least {', '.join(NEEDED)}")
    if any(None in cells for cells in rows):
        number = next(number for number, cells in enumerate(rows, 1) if None in cells)
        raise RowsError(f"{path}: row {number} has more cells than the header has columns")
    return tuple(Row.of(cells) for cells in rows)
