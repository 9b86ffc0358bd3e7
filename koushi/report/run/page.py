"""The page of a run that was measured: its course, and what was predicted against what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from koushi.report.run.measured import Began, Measured, Row
from koushi.report.run.svg import Mark, Series, line_chart
from koushi.units import bytes_text, count_text, seconds_text

BLUE, ORANGE, GREEN = "var(--pp)", "var(--tp)", "var(--dp_shard)"
MOST_RANKS = 64
"""Rows of the table of ranks; of more, the slowest and the fullest are shown."""


def run_page(run: Measured) -> str:
    """One self-contained HTML page."""
    read = {
        name: (files(f"koushi.report.{part}") / name).read_text(encoding="utf-8")
        for part, name in (("page", "page.css"), ("run", "run.html"))
    }
    sections = [_figures(run), _course(run), _against(run), _ranks(run)]
    return Template(read["run.html"]).substitute(
        title=escape(run.name), style=read["page.css"], body="\n".join(one for one in sections if one)
    )


def said(english: str, japanese: str) -> str:
    """A text in both languages, of which the page shows one."""
    return f'<span lang="en">{escape(english)}</span><span lang="ja">{escape(japanese)}</span>'


def loss_text(row: Row) -> str:
    """The row's loss; words where it is no finite number."""
    return "not finite" if row["loss"] is None else f"{row['loss']:.4f}"


def _figures(run: Measured) -> str:
    last = run.steps[-1]
    found = [
        (f"{last['step']:,}", said("steps", "ステップ")),
        (loss_text(last), said("last loss", "最後の損失")),
        (f"{run.rate:,.0f}", said("tokens/s", "トークン/秒")),
        (seconds_text(run.step_seconds), said("a step (median)", "1 ステップの中央値")),
        (seconds_text(last["elapsed_seconds"]), said("in all", "全体")),
        (count_text(last["samples"]), said("samples read", "読んだサンプル")),
    ]
    if last.get("mfu") is not None:
        found.append((f"{last['mfu']:.1%}", said("MFU (PaLM)", "MFU (PaLM)")))
    cells = "".join(f'<div class="figure"><b>{value}</b><span>{text}</span></div>' for value, text in found)
    return f'<section class="figures">{cells}</section>'


def _course(run: Measured) -> str:
    def points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
        return [(row["step"], row[key]) for row in rows if row.get(key) is not None]

    loss = [Series("loss", points(run.steps, "loss"), BLUE)]
    if run.validations:
        loss.append(Series("validation loss", points(run.validations, "validation_loss"), ORANGE, dashed=True))
    rate = Series("tokens/s", points(run.steps, "tokens_per_second"), GREEN)
    marks = [Mark(one.step, one.layout) for one in run.layouts[1:]]
    charts = (
        (said("Loss", "損失"), "loss", loss),
        (said("Gradient norm", "勾配ノルム"), "gradient norm", [Series("", points(run.steps, "grad_norm"), ORANGE)]),
        (said("Tokens per second", "毎秒のトークン"), "tokens per second", [rate]),
        (said("Learning rate", "学習率"), "learning rate", [Series("", points(run.steps, "lr"), BLUE)]),
    )
    shown = "".join(
        f"<figure><figcaption>{title}{_key(series)}</figcaption>{line_chart(label, series, marks)}</figure>"
        for title, label, series in charts
    )
    title = f"<h2>{said('Its course', '経過')}</h2>"
    return f'<section>{title}{_layouts(run.layouts)}<div class="charts">{shown}</div></section>'


def _layouts(layouts: Sequence[Began]) -> str:
    """The steps of each, where the run went on with another."""
    if len(layouts) < 2:
        return ""
    ends = [one.step for one in layouts[1:]]
    rows = [
        f"<tr><td>{said(f'steps {one.step + 1:,} to {end:,}', f'ステップ {one.step + 1:,} から {end:,}')}</td>"
        f"<td>{escape(one.layout)}</td></tr>"
        for one, end in zip(layouts, ends, strict=False)
    ]
    last = layouts[-1]
    since = said(f"from step {last.step + 1:,} on", f"ステップ {last.step + 1:,} 以降")
    rows.append(f"<tr><td>{since}</td><td>{escape(last.layout)}</td></tr>")
    hint = said(
        "The run went on with another layout where a line goes through the charts. Figures of steps and ranks are of "
        "the last one.",
        "図の縦線のところで、別のレイアウトで続けた。ステップとランクの数値は、最後のレイアウトのもの。",
    )
    return f'<p class="hint">{hint}</p><table>{"".join(rows)}</table>'


def _key(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    return " " + " ".join(
        f'<span class="chip" style="background:{one.colour}"></span>{escape(one.name)}' for one in series
    )


def _against(run: Measured) -> str:
    """What was predicted against what was measured; empty where nothing was predicted."""
    title = f"<h2>{said('Predicted and measured', '予測と実測')}</h2>"
    if run.predicted is None:
        return ""
    rows = [_compared(said("step", "ステップ"), run.predicted["step_seconds"], run.step_seconds, seconds_text)]
    memory = _most_memory(run)
    if memory is not None:
        name = said("highest memory of a rank", "ランクの最大メモリ")
        alike = run.predicted["device"] != "cpu"
        rows.append(_compared(name, run.predicted["memory_bytes"], memory, bytes_text, alike=alike))
    for submesh, sent in run.predicted["bytes"].items():
        found = (run.ranks or {}).get("bytes", {}).get(submesh)
        name = f"{escape(submesh)}: " + said("bytes that rank 0 sends in a step", "1 ステップにランク 0 が送るバイト")
        rows.append(_compared(name, sent, found, bytes_text))
    head = "".join(
        f"<th{' class=n' if n else ''}>{text}</th>"
        for n, text in enumerate(
            ("", said("predicted", "予測"), said("measured", "実測"), said("measured / predicted", "実測 / 予測"))
        )
    )
    hardware = escape(str(run.predicted["hardware"]))
    note = said("Predicted for ", "予測の対象: ") + hardware
    if run.predicted["device"] == "cpu":
        note += said(
            ". On a CPU, predicted memory is that of tensors; measured is what the process grew by, with Python's and "
            "gloo's own. Other work on the machine makes steps longer.",
            "。CPU では、予測はテンソルのメモリ、実測は Python と gloo の分を含むプロセスの増分です。"
            "ほかの仕事があればステップは長くなります。",
        )
    return f'<section>{title}<p class="hint">{note}</p><table><tr>{head}</tr>{"".join(rows)}</table></section>'


def _compared(
    name: str, predicted: float, measured: float | None, text: Callable[[float], str], *, alike: bool = True
) -> str:
    """A row; of two figures that are not ``alike`` none is told as a share of the other."""
    if measured is None:
        found, ratio = said("not measured: debug.audit was off", "未計測。debug.audit が off"), ""
    else:
        found, ratio = text(measured), f"{measured / predicted:.2f}" if alike and predicted > 1e-30 else ""
    numbers = "".join(f'<td class="n">{one}</td>' for one in (text(predicted), found, ratio))
    return f"<tr><td>{name}</td>{numbers}</tr>"


def _most_memory(run: Measured) -> float | None:
    if run.ranks is not None:
        return float(max(run.ranks["memory_bytes"]))
    found = [row["memory_bytes"] for row in run.steps if row.get("memory_bytes") is not None]
    return float(max(found)) if found else None


def _ranks(run: Measured) -> str:
    """Time and memory of every rank at the last report, the one that all wait for first."""
    if run.ranks is None:
        return ""
    waited, memory, places = (run.ranks[key] for key in ("waited_seconds", "memory_bytes", "coordinates"))
    order = sorted(range(len(waited)), key=lambda rank: waited[rank])
    shown = order if len(order) <= MOST_RANKS else order[:MOST_RANKS]
    longest = max(*waited, 1e-12)
    rows = "".join(_rank_row(rank, places[rank], waited[rank], longest, memory[rank]) for rank in shown)
    head = "".join(
        f"<th>{text}</th>"
        for text in (
            said("rank", "ランク"),
            said("coordinate", "座標"),
            said("waited for others in a step", "1 ステップに待った時間"),
            "",
            said("highest memory", "最大メモリ"),
        )
    )
    hint = said(
        "The rank that waited least is the one that the others wait for.",
        "最も待たなかったランクを、ほかのランクが待っている。",
    )
    more = len(order) - len(shown)
    rest = (
        f'<p class="hint">{said(f"and {more} more, which waited longer", f"ほか {more} ランクはより長く待った")}</p>'
        if more
        else ""
    )
    title = f"<h2>{said('Every rank', '各ランク')}</h2>"
    return f'<section>{title}<p class="hint">{hint}</p><table><tr>{head}</tr>{rows}</table>{rest}</section>'


def _rank_row(rank: int, place: str, waited: float, longest: float, memory: float) -> str:
    bar = f'<div class="track"><i style="width:{100 * waited / longest:.1f}%;background:var(--waste)"></i></div>'
    cells: list[Any] = [rank, escape(place), f"{waited:.3g} s", bar, bytes_text(memory)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
