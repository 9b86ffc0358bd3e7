"""``koushi generate``: text from a checkpoint or a Hugging Face folder, on one device."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from koushi.checkpoint.hf import HfWeights
from koushi.checkpoint.tokenizer_files import TOKENIZER, tokenizer_of
from koushi.checkpoint.trained import CheckpointWeights
from koushi.checkpoint.weights import Weights, whole_model
from koushi.data.tokenizer import Encoder
from koushi.errors import DataError
from koushi.generate.sample import Sampling, as_text, continuation
from koushi.models.hf_folder import CONFIG, is_hf_folder, read_object
from koushi.models.llama.flops import parameter_count
from koushi.parallel.device_mesh import local_device, resolve_device
from koushi.units import count_text


@dataclass(frozen=True)
class Source:
    """Weights and the tokenizer that goes with them."""

    weights: Weights
    encoder: Encoder
    stop_ids: frozenset[int]
    trained_here: bool
    """Documents then began after an end of document, without any other special token."""


def generate(path: Path, prompt: str, sampling: Sampling, tokenizer: Path | None = None) -> None:
    """Print ``prompt`` and what the model makes follow it. Raises KoushiError."""
    device = local_device(resolve_device("auto"))
    with ExitStack() as opened:
        source = _open(path, tokenizer, opened)
        model = whole_model(source.weights, 1, device, torch.float32)
    ids = _prompt_ids(source, prompt)
    print(
        f"{path}: {count_text(parameter_count(source.weights.size))} parameters in float32 on {device.type}; every "
        "token goes through the whole text again (there is no key-value cache yet)",
        file=sys.stderr,
    )
    vocab_size = min(source.encoder.vocab_size, source.weights.size.vocab_size)
    following = continuation(model, ids, sampling, source.stop_ids, vocab_size)
    print(prompt, end="", flush=True)
    for piece in as_text(lambda some: str(source.encoder.tokenizer.decode(some)), ids, following):
        print(piece, end="", flush=True)
    print()


def _open(path: Path, tokenizer: Path | None, opened: ExitStack) -> Source:
    if is_hf_folder(path):
        found = _stop_ids(path)
        if tokenizer is None and not (path / TOKENIZER).is_file():
            raise DataError(f"{path} holds no {TOKENIZER}; name one with --tokenizer")
        encoder = Encoder(tokenizer or path / TOKENIZER, min(found, default=None))
        encoder.tokenizer.encode_special_tokens = False  # a prompt may spell them, as chat templates do
        return Source(opened.enter_context(HfWeights(path)), encoder, found or frozenset({encoder.end_id}), False)
    trained = opened.enter_context(CheckpointWeights(path))
    used = tokenizer or tokenizer_of(trained.config)
    if used is None:
        raise DataError(f"{path} was trained on token ids; name a tokenizer.json with --tokenizer")
    origin = trained.config.model.hf
    encoder = Encoder(used, trained.config.data.end_of_document_id)
    stop_ids = {encoder.end_id}
    if origin is not None and (Path(origin) / CONFIG).is_file():
        stop_ids |= _stop_ids(Path(origin))
    return Source(trained, encoder, frozenset(stop_ids), trained.files.manifest.head.step > 0)


def _stop_ids(folder: Path) -> frozenset[int]:
    """The ends of text that a Hugging Face folder names: one, several or none."""
    eos = read_object(folder / CONFIG).get("eos_token_id")
    return frozenset(one for one in (eos if isinstance(eos, list) else [eos]) if isinstance(one, int))


def _prompt_ids(source: Source, prompt: str) -> list[int]:
    encoding = source.encoder.tokenizer.encode(prompt, add_special_tokens=not source.trained_here)
    ids = [int(one) for one in encoding.ids]
    if source.trained_here or not ids:
        ids.insert(0, source.encoder.end_id)
    beyond = [one for one in ids if one >= source.weights.size.vocab_size]
    if beyond:
        raise DataError(
            f"the tokenizer gives id {beyond[0]}, and the model knows {source.weights.size.vocab_size}; "
            "name the tokenizer it was trained with"
        )
    return ids
