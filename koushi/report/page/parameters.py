"""What a page shows of single parameters: how each is cut, and what happens to it in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from koushi.job import Job
from koushi.layout import Shard
from koushi.models.llama.layout import EMBEDDING, OUTPUT, Parameter, parameters

Event = dict[str, Any]


def shown_parameters(job: Job, tp_degrees: Sequence[int]) -> list[dict[str, Any]]:
    """The parameters of the first block and of both ends, with their cut at each of ``tp_degrees``."""
    of_degree = {degree: parameters(job.size, degree) for degree in tp_degrees if degree <= job.size.n_heads}
    names = [name for name in of_degree[1] if not name.startswith("layers.") or name.startswith("layers.0.")]
    return [
        {
            "name": name,
            "shape": list(of_degree[1][name].shape),
            "tp": {degree: _axis(found[name]) for degree, found in of_degree.items()},
            "events": _events(job, of_degree[1][name]),
        }
        for name in names
    ]


def _axis(parameter: Parameter) -> int | None:
    return parameter.tp.dim if isinstance(parameter.tp, Shard) else None


def _events(job: Job, parameter: Parameter) -> list[Event]:
    """In the order of a step of one microbatch; each shows only where every one of its dims has a degree above 1."""
    reshards = job.config.parallelism.reshard_after_forward == "always"
    at_end = parameter.name in (OUTPUT, "norm.weight")
    in_block = parameter.name.startswith("layers.")
    gather = {
        "dims": ["dp_shard"],
        "lights": "row",
        "colour": "dp_shard",
        "text": {
            "en": "all-gather over dp_shard: every rank holds its tp piece whole",
            "ja": "dp_shard で all-gather。どのランクも tp の部分を丸ごと持つ",
        },
    }
    events: list[Event] = [{"phase": "forward", **gather}]
    if parameter.name == EMBEDDING:
        events.append(_said("forward", "look-up of the tokens that lie here", "ここにあるトークンを引く", lights="row"))
        events.append(_scatter("forward"))
    else:
        events.append(_gathered("forward"))
        events.append(_said("forward", "used on this microbatch", "このマイクロバッチに使う", lights="row"))
        if in_block:
            events.append(_scatter("forward"))
    if reshards and not at_end:
        events.append(
            _said("forward", "freed but for this rank's shard", "自分のシャードを残して解放", dims=["dp_shard"])
        )
        events.append({"phase": "backward", **gather})
    events.append(_said("backward", "its gradient is computed", "勾配を計算する", lights="row"))
    events.append(
        _said(
            "backward",
            "reduce-scatter over dp_shard: gradients summed, each rank keeps its shard",
            "dp_shard で reduce-scatter。勾配を足し、各ランクは自分のシャードを持つ",
            dims=["dp_shard"],
            colour="dp_shard",
        )
    )
    events.append(
        _said(
            "backward",
            "all-reduce over dp_replicate: shards summed over the replicas",
            "dp_replicate で all-reduce。シャードを複製の間で足す",
            dims=["dp_replicate"],
            colour="dp_replicate",
        )
    )
    if parameter.copied_over_tp:
        events.append(
            _said(
                "optimizer",
                "all-reduce over tp: each rank saw a part of the sequence or of the heads",
                "tp で all-reduce。各ランクは系列かヘッドの一部だけを見た",
                dims=["tp"],
                colour="tp",
            )
        )
    if job.size.tie_embeddings and parameter.name == EMBEDDING:
        events.append(
            _said(
                "optimizer",
                "first and last stage exchange their gradients over pp",
                "最初と最後のステージが pp で勾配を交換する",
                dims=["pp"],
                colour="pp",
            )
        )
    events.append(_said("optimizer", "AdamW updates this rank's shard", "AdamW が自分のシャードを更新する"))
    return events


def _gathered(phase: str) -> Event:
    text = (
        "all-gather over tp: activations cut along the sequence are joined",
        "tp で all-gather。系列で切った活性を合わせる",
    )
    return _said(phase, *text, dims=["tp"], lights="row", colour="tp")


def _scatter(phase: str) -> Event:
    text = (
        "reduce-scatter over tp: partial sums are added and cut along the sequence",
        "tp で reduce-scatter。部分和を足し、系列で切る",
    )
    return _said(phase, *text, dims=["tp"], lights="whole", colour="tp")


def _said(
    phase: str, english: str, japanese: str, dims: Sequence[str] = (), lights: str = "piece", colour: str = ""
) -> Event:
    text = {"en": english, "ja": japanese}
    return {"phase": phase, "dims": list(dims), "lights": lights, "colour": colour, "text": text}
