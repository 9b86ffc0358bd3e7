"""Which tokenizer a run was trained with, and what a Hugging Face folder says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from koushi.checkpoint.hf import About
from koushi.config.schema import JobConfig
from koushi.data.tokenizer import Encoder, tokenizer_path
from koushi.errors import DataError, WeightsError
from koushi.models.hf_folder import CONFIG, read_object

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
BESIDE = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files of a Hugging Face folder that belong to its tokenizer, or to generating with it."""


def tokenizer_of(config: JobConfig) -> Path | None:
    """The tokenizer.json that a run's text went through; None where the run saw token ids only.

    Raises DataError if it isn't there any more.
    """
    data = config.data
    if data.source == "synthetic" or (data.source == "tokens" and data.tokenizer == "embedded"):
        return None
    return tokenizer_path(data.tokenizer, Path())


def about(config: JobConfig) -> tuple[About, str]:
    """What to write beside the weights of a run, and what could not be, for people."""
    origin = Path(config.model.hf) if config.model.hf else None
    try:
        path = tokenizer_of(config)
        if path is None or (origin is not None and path.parent == origin):
            return _of_origin(origin, config.training.seq_len)
        end_id = Encoder(path, config.data.end_of_document_id).end_id
    except DataError as error:
        return About(config.training.seq_len, None, None), f"without a tokenizer: {error}"
    if (path.parent / SETTINGS).is_file():
        return About(config.training.seq_len, None, end_id, _files(path.parent)), ""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.training.seq_len,
        "eos_token": Encoder(path, end_id).tokenizer.id_to_token(end_id),
    }
    return About(config.training.seq_len, None, end_id, ((path, TOKENIZER),), {SETTINGS: settings}), ""


def _of_origin(origin: Path | None, seq_len: int) -> tuple[About, str]:
    """What the Hugging Face folder says that the weights came from."""
    if origin is None:
        return About(seq_len, None, None), "without a tokenizer: the run was trained on token ids"
    try:
        config = read_object(origin / CONFIG)
    except WeightsError as error:
        return About(seq_len, None, None), f"without a tokenizer: {error}"
    longest = config.get("max_position_embeddings")
    return (
        About(
            max(seq_len, longest) if isinstance(longest, int) else seq_len,
            config.get("bos_token_id"),
            config.get("eos_token_id"),
            _files(origin),
        ),
        "",
    )


def _files(folder: Path) -> tuple[tuple[Path, str], ...]:
    return tuple((folder / name, name) for name in BESIDE if (folder / name).is_file())
