"""Rows of published runs by the dozen cells that matter, the rest empty."""

from __future__ import annotations

from koushi.accuracy.rows import Row

LLAMA_8B = {
    "row_id": "one",
    "source": "torchtitan-example",
    "model": "llama3-8b",
    "layers": "32",
    "hidden": "4096",
    "ffn": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "h100-sxm-80gb",
    "gpus": "8",
    "nodes_gpus_per_node": "1x8",
    "dp_replicate": "1",
    "dp_shard": "8",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "1",
    "micro_batch": "1",
    "global_batch": "8",
    "precision": "bf16",
    "zero_stage": "3",
    "tokens_per_s_per_gpu": "6000",
    "peak_mem_gib": "47.5",
}


def row(**cells: str) -> Row:
    """An 8B on eight H100, with ``cells`` otherwise."""
    return Row.of(LLAMA_8B | cells)
