"""How the parts of a run file must fit together: each rule, its place and the legal values it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from koushi.errors import Problem

Problems = Callable[..., tuple[Problem, ...]]

PP2 = "pipeline_parallel_degree: 2"


def marked(text: str) -> tuple[str, str]:
    before = text[: text.index("§")]
    return text.replace("§", ""), f"run.yaml:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def schedule(name: str, rest: str = "") -> str:
    return f"parallelism: {{{PP2}, pipeline_parallel_schedule: {name}{rest}}}\n"


CASES = [
    # The world.
    (
        "parallelism: {tensor_parallel_degree: 2, world_size: §9}",
        "parallelism.world_size",
        "the degrees multiply to 2 (pp 1 x dp_replicate 1 x dp_shard 1 x tp 2), the world has 9, "
        "which tp 2 does not divide",
        "a tp that divides 9, or a world of 2",
    ),
    (
        "parallelism: {pipeline_parallel_degree: 5, tensor_parallel_degree: 8, world_size: §12}",
        "parallelism.world_size",
        "the degrees multiply to 40 (pp 5 x dp_replicate 1 x dp_shard 1 x tp 8), the world has 12, "
        "which pp 5 and tp 8 do not divide",
        "a pp and a tp that divide 12, or a world of 40",
    ),
    (
        "parallelism: {tensor_parallel_degree: 2, world_size: §8}",
        "parallelism.world_size",
        "the degrees multiply to 2 (pp 1 x dp_replicate 1 x dp_shard 1 x tp 2), the world has 8",
        "data_parallel_shard_degree 4, or data_parallel_replicate_degree 4, or a world of 2",
    ),
    (
        "parallelism:\n  data_parallel_shard_degree: §-1\n",
        "parallelism.data_parallel_shard_degree",
        "is -1, what is left of the world, but the world is not known",
        "set parallelism.world_size",
    ),
    (
        "parallelism:\n  data_parallel_shard_degree: §0\n",
        "parallelism.data_parallel_shard_degree",
        "is 0",
        "an integer of at least 1, or -1 for what is left of the world",
    ),
    (
        "parallelism:\n  data_parallel_shard_degree: §-2\n",
        "parallelism.data_parallel_shard_degree",
        "is -2",
        "an integer of at least 1, or -1 for what is left of the world",
    ),
    (
        "parallelism: {data_parallel_shard_degree: §-1, tensor_parallel_degree: 4, world_size: 6}",
        "parallelism.data_parallel_shard_degree",
        "is -1, but the world of 6 does not divide by the other degrees, pp 1 x dp_replicate 1 x tp 4 = 4",
        "a world of 4 or 8, or smaller degrees",
    ),
    (
        "parallelism: {data_parallel_replicate_degree: §2000000}\ntraining: {global_batch_size: 2000000}",
        "parallelism.data_parallel_replicate_degree",
        "is 2000000, more than any lattice has",
        "at most 1048576",
    ),
    (
        "parallelism: {tensor_parallel_degree: 4, pipeline_parallel_degree: 3, world_size: §6}",
        "parallelism.world_size",
        "the degrees multiply to 12 (pp 3 x dp_replicate 1 x dp_shard 1 x tp 4), the world has 6, "
        "which tp 4 does not divide",
        "tensor_parallel_degree 2, or a world of 12",
    ),
    # The model.
    (
        "model: {name: §llama3-8}",
        "model.name",
        "is 'llama3-8', not a model",
        "did you mean llama3-8b? The models are llama3-debug, llama3-1b",
    ),
    (
        "model: {n_heads: §12, n_kv_heads: 4}",
        "model.n_heads",
        "12 heads do not divide dim 256",
        "n_heads that divide 256 into even parts: 1, 2, 4, 8, 16, 32, 64 or 128",
    ),
    (
        "model: {dim: §24}",
        "model.dim",
        "8 heads of dim 24 are 3 wide, which rotary cannot halve",
        "n_heads that divide 24 into even parts: 1, 2, 3, 4, 6 or 12",
    ),
    ("model: {n_kv_heads: §3}", "model.n_kv_heads", "3 KV heads do not divide 8 heads", "n_kv_heads 1, 2, 4 or 8"),
    ("model: {n_layers: §1000000}", "model.n_layers", "is 1000000", "at most 10000 layers"),
    ("training: {global_batch_size: §1000002}", "training.global_batch_size", "is 1000002", "at most 1000000 samples"),
    (
        "model: {rope_scaling: {high_freq_factor: §1}}",
        "model.rope_scaling.high_freq_factor",
        "high_freq_factor 1.0 is not above low_freq_factor 1.0",
        "a high_freq_factor above 1.0",
    ),
    # Tensor parallel.
    (
        "model: {n_kv_heads: 8, ffn_dim: 768, vocab_size: 2064}\ntraining: {seq_len: 48}\n"
        "parallelism: {tensor_parallel_degree: §16}",
        "parallelism.tensor_parallel_degree",
        "8 heads do not divide over tp 16",
        "this model's tensor parallel degrees are 1, 2, 4 or 8",
    ),
    (
        "model: {n_heads: 16, n_kv_heads: 4, dim: 192, vocab_size: 2052}\ntraining: {seq_len: 48}\n"
        "parallelism: {tensor_parallel_degree: §3}",
        "parallelism.tensor_parallel_degree",
        "16 heads do not divide over tp 3",
        "this model's tensor parallel degrees are 1, 2 or 4",
    ),
    (
        "model: {n_heads: 24, n_kv_heads: 8, dim: 192, ffn_dim: 768, vocab_size: 2064}\ntraining: {seq_len: 48}\n"
        "parallelism: {tensor_parallel_degree: §12}",
        "parallelism.tensor_parallel_degree",
        "8 KV heads can be neither cut nor copied evenly over tp 12",
        "this model's tensor parallel degrees are 1, 2, 4, 8 or 24",
    ),
    (
        "model: {ffn_dim: §770}\nparallelism: {tensor_parallel_degree: 4}",
        "model.ffn_dim",
        "ffn_dim 770 does not divide over tp 4",
        "ffn_dim 768 or 772; this model's tensor parallel degrees are 1 or 2",
    ),
    (
        "model: {vocab_size: §2050}\nparallelism: {tensor_parallel_degree: 4}",
        "model.vocab_size",
        "vocab_size 2050 does not divide over tp 4",
        "vocab_size 2048 or 2052; this model's tensor parallel degrees are 1 or 2",
    ),
    (
        "training: {seq_len: §510}\nparallelism: {tensor_parallel_degree: 4}",
        "training.seq_len",
        "seq_len 510 does not divide over tp 4, as sequence parallel needs",
        "seq_len 508 or 512, or a tensor_parallel_degree that divides 510",
    ),
    # Pipeline parallel.
    (
        "parallelism: {pipeline_parallel_stages_per_rank: §2}",
        "parallelism.pipeline_parallel_stages_per_rank",
        "is 2, but there is no pipeline to divide",
        "leave it empty, or set parallelism.pipeline_parallel_degree above 1",
    ),
    (
        "parallelism: {pipeline_parallel_layers_per_stage: §[6]}",
        "parallelism.pipeline_parallel_layers_per_stage",
        "is set, but there is no pipeline to divide",
        "leave it empty",
    ),
    (
        schedule("1F1B", ", pipeline_parallel_stages_per_rank: §2"),
        "parallelism.pipeline_parallel_stages_per_rank",
        "is 2, but 1F1B needs exactly 1",
        "exactly 1, or a schedule for 2: Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV",
    ),
    (
        schedule("LoopedBFS", ", pipeline_parallel_stages_per_rank: §1"),
        "parallelism.pipeline_parallel_stages_per_rank",
        "is 1, but LoopedBFS needs at least 2",
        "at least 2, or a schedule for 1: GPipe, 1F1B",
    ),
    (
        schedule("ZBVZeroBubble", ", pipeline_parallel_stages_per_rank: §3"),
        "parallelism.pipeline_parallel_stages_per_rank",
        "is 3, but ZBVZeroBubble needs exactly 2",
        "exactly 2, or a schedule for 3: Interleaved1F1B, LoopedBFS, InterleavedZeroBubble",
    ),
    (
        "parallelism: {pipeline_parallel_degree: §8}\n",
        "parallelism.pipeline_parallel_degree",
        "6 layers are fewer than 8 stages (8 ranks x 1)",
        "a pipeline_parallel_degree of at most 6, or parallelism.pipeline_parallel_layers_per_stage",
    ),
    (
        f"model: {{n_layers: 1}}\nparallelism: {{{PP2.replace(': ', ': §')}}}",
        "parallelism.pipeline_parallel_degree",
        "1 layer is fewer than 2 stages (2 ranks x 1)",
        "at least 2 layers, or parallelism.pipeline_parallel_layers_per_stage",
    ),
    (
        f"parallelism: {{{PP2}, pipeline_parallel_layers_per_stage: §[2, 2, 2]}}",
        "parallelism.pipeline_parallel_layers_per_stage",
        "has 3 entries for 2 stages (2 ranks x 1)",
        "2 entries",
    ),
    (
        f"parallelism: {{{PP2}, pipeline_parallel_layers_per_stage: §[2, 3]}}",
        "parallelism.pipeline_parallel_layers_per_stage",
        "adds up to 5 layers, the model has 6",
        "entries that add up to 6",
    ),
    (
        schedule("LoopedBFS", ", pipeline_parallel_layers_per_stage: §[3, 0, 3, 0]"),
        "parallelism.pipeline_parallel_layers_per_stage",
        "leaves stage 1 without layers",
        "at least 1 layer",
    ),
    (
        schedule("1F1B") + "training: {global_batch_size: §1}",
        "training.global_batch_size",
        "makes 1 microbatch, but 1F1B needs at least as many as there are stages, 2",
        "2 microbatches, as with a global_batch_size of 2 at this microbatch_size",
    ),
    (
        schedule("DualPipeV") + "training: {global_batch_size: §6, microbatch_size: 2}",
        "training.global_batch_size",
        "makes 3 microbatches, but DualPipeV needs at least as many as there are stages, 4",
        "4 microbatches, as with a global_batch_size of 8 at this microbatch_size",
    ),
    (
        schedule("Interleaved1F1B") + "training: {global_batch_size: §5}",
        "training.global_batch_size",
        "makes 5 microbatches, but Interleaved1F1B needs them to divide into 2 rounds of about 2",
        "4 or 6 microbatches, as with a global_batch_size of 4 or 6 at this microbatch_size",
    ),
    (
        schedule("InterleavedZeroBubble") + "training: {global_batch_size: §7}",
        "training.global_batch_size",
        "makes 7 microbatches, but InterleavedZeroBubble needs them to divide into 3 rounds of about 2",
        "6 or 8 microbatches",
    ),
    (
        schedule("1F1B", ", reshard_after_forward: §always"),
        "parallelism.reshard_after_forward",
        "is always, but under pipelining every microbatch would gather the parameters again",
        "auto or never",
    ),
    (
        schedule("ZBVZeroBubble", ", reshard_after_forward: §always"),
        "parallelism.reshard_after_forward",
        "is always, but under pipelining torch computes wrong gradients under ZBVZeroBubble",
        "auto or never",
    ),
    (
        schedule("DualPipeV") + "training: {compile: §true}",
        "training.compile",
        "is true, but DualPipeV splits backward in two, which torch cannot do in compiled blocks",
        "false, or a schedule of GPipe, 1F1B, Interleaved1F1B, LoopedBFS",
    ),
    # The batch.
    (
        "parallelism: {data_parallel_shard_degree: 2, data_parallel_replicate_degree: 3}\n"
        "training: {global_batch_size: §16, microbatch_size: 2}",
        "training.global_batch_size",
        "16 samples do not divide over 6 data-parallel ranks (dp_replicate 3 x dp_shard 2)",
        "a global_batch_size of 12 or 24",
    ),
    (
        "parallelism: {data_parallel_shard_degree: 2}\ntraining: {global_batch_size: 16, microbatch_size: §3}",
        "training.microbatch_size",
        "microbatches of 3 do not divide the local batch of 8 samples (16 over 2 data-parallel ranks)",
        "a microbatch_size of 1, 2, 4 or 8, or a global_batch_size of 12 or 18",
    ),
    # Precision.
    (
        "precision: {parameters: float64, compute: §float32, reduce: float64}",
        "precision.compute",
        "is float32 with float64 parameters",
        "float64",
    ),
    (
        "precision: {parameters: §float64, compute: float64}",
        "precision.parameters",
        "precision.reduce is float32 with float64 parameters",
        "float64",
    ),
    (
        "precision: {compute: §float64}",
        "precision.compute",
        "is float64 with float32 parameters",
        "float32 or bfloat16, or precision.parameters float64",
    ),
    # Training.
    (
        "validation: {every: 5}\ndata: {validation_fraction: §0}",
        "data.validation_fraction",
        "is 0, but validation.every is 5",
        "a validation_fraction above 0, or validation.every 0",
    ),
    # Checkpoints.
    (
        "checkpoint: {keep_every: §100}",
        "checkpoint.keep_every",
        "is 100, but checkpoint.every is 0, so there are no checkpoints",
        "a checkpoint.every above 0, or checkpoint.keep_every 0",
    ),
    (
        "checkpoint: {every: 30, keep_every: §100}",
        "checkpoint.keep_every",
        "is 100, and no checkpoint of every 30 steps may fall on it",
        "a multiple of checkpoint.every, such as 90 or 120",
    ),
    (
        "run: {resume: §nowhere}",
        "run.resume",
        "is 'nowhere', and there is no such folder",
        "auto, never, or the folder of a checkpoint or of a run",
    ),
    (
        "run: {resume: §''}",
        "run.resume",
        "is '', and there is no such folder",
        "auto, never, or the folder of a checkpoint or of a run",
    ),
    ("run: {hardware: §h1000}", "run.hardware", "is 'h1000', and no hardware is called that", "did you mean h100"),
    ("run: {hardware: §even.yaml}", "run.hardware", "even.yaml:1:1: no such file", ""),
    ("run: {folder: §''}", "run.folder", "is '', which cannot be a folder", "a folder, there or not"),
    # Data.
    ("data: {source: §text}", "data.source", "data.path is empty, but the source text reads files", "a file, a folder"),
    (
        "data: {path: §corpus.txt}",
        "data.path",
        "is 'corpus.txt', but the source embedded reads no files",
        "leave it empty, or a data.source of text, jsonl, parquet, tokens",
    ),
    (
        "data: {source: synthetic, path: §x}",
        "data.path",
        "is 'x', but the source synthetic reads no files",
        "leave it empty",
    ),
    ("data: {source: text, path: §gone.txt}", "data.path", "is 'gone.txt': no file matches", "give a file, a folder"),
    ("data: {source: text, path: §'gone*.txt'}", "data.path", "is 'gone*.txt': no file matches", "give a file"),
    ("data: {source: jsonl, path: §folder}", "data.path", "is 'folder': the folder", "name others by a glob"),
    ("data: {source: text, path: §empty.txt}", "data.path", "is 'empty.txt', which holds nothing", "files with data"),
    ('data: {source: text, path: §"a\\0b"}', "data.path", "is 'a\\x00b'", ""),
    ("data: {source: tokens, path: §odd.bin}", "data.path", "odd.bin has 3 bytes, not a whole number of", "a file"),
    (
        "data: {source: tokens, path: even.bin, token_dtype: uint16, tokenizer: §gone.json}",
        "data.tokenizer",
        "is 'gone.json', and there is no such file",
        "embedded, or the path of a tokenizer.json, relative to the run file",
    ),
    ("data: {masked_fraction: §0.5}", "data.masked_fraction", "is 0.5, but the source is embedded", "0, or a data."),
    (
        "data: {source: synthetic, masked_fraction: §1}",
        "data.masked_fraction",
        "is 1, which leaves no label for the loss",
        "a fraction below 1",
    ),
    (
        "model: {vocab_size: 65538}\ndata: {source: tokens, path: even.bin, token_dtype: §uint16}",
        "data.token_dtype",
        "is uint16, which ends at 65535, but vocab_size is 65538",
        "uint32, or a vocab_size of at most 65536",
    ),
    (
        "data: {source: tokens, path: even.bin, end_of_document_id: §2048}",
        "data.end_of_document_id",
        "is 2048, outside the vocabulary of 2048",
        "an id from 0 to 2047",
    ),
    (
        "model: {vocab_size: §1024}",
        "model.vocab_size",
        "the tokenizer is larger than the model's vocabulary: embedded has ids up to",
        "a vocab_size of at least",
    ),
    (
        "model: {name: llama3-1b}\ndata: {tokenizer: §large.json}",
        "data.tokenizer",
        "the tokenizer is larger than the model's vocabulary: large.json has ids up to 200000, vocab_size is 128256",
        "a vocab_size of at least 200001",
    ),
    (
        "data: {tokenizer: §large.json}\nparallelism: {tensor_parallel_degree: 4}",
        "data.tokenizer",
        "the tokenizer is larger than the model's vocabulary: large.json has ids up to 200000, vocab_size is 2048",
        "a vocab_size of at least 200004 that is a multiple of tp 4",
    ),
    (
        "data: {tokenizer: §broken.json}",
        "data.tokenizer",
        "is 'broken.json', which is not a tokenizer: is not JSON (line 1:",
        "embedded, or the path of a Hugging Face tokenizer.json",
    ),
    ("data: {tokenizer: §folder}", "data.tokenizer", "is 'folder', and there is no such file", "embedded"),
]


@pytest.mark.usefixtures("neighbours")
@pytest.mark.parametrize(("text", "key", "what", "legal"), CASES, ids=[f"{case[1]}-{case[2]}"[:70] for case in CASES])
def test_a_rule_names_place_fault_and_remedy(problems: Problems, text: str, key: str, what: str, legal: str) -> None:
    text, where = marked(text)
    found = [one for one in problems(text) if one.what.startswith(what) and one.key == key]
    assert [one.where for one in found] == [where], problems(text)
    assert found[0].legal.startswith(legal), found[0]
