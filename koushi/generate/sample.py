"""Sampling: the next token of a text, again and again. V is the vocabulary, T the length so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from koushi.models.llama.model import Llama

HALF_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are no whole character, or not yet."""


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float
    """What logits are divided by; 0: always the likeliest token."""
    top_k: int | None
    """Only the likeliest ones are drawn from; None: all."""
    seed: int


@torch.no_grad()
def continuation(
    model: Llama, prompt: Sequence[int], sampling: Sampling, stop_ids: Collection[int], vocab_size: int
) -> Iterator[int]:
    """Token ids that follow ``prompt``, which must hold one at least, until one of ``stop_ids``, left out.

    Ids of ``vocab_size`` and more, which the tokenizer does not know, are never drawn. Every token goes
    through the whole text again: there is no key-value cache.
    """
    assert prompt, "a continuation needs a token to begin with"
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(sampling.max_tokens):
        logits: Tensor = model(torch.tensor([ids], device=device))[0, -1, :vocab_size]
        chosen = choose(logits.float().cpu(), sampling, random)
        if chosen in stop_ids:
            return
        ids.append(chosen)
        yield chosen


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """An id, drawn by its logit [V]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        kept, places = logits.topk(sampling.top_k)
        return int(places[torch.multinomial(kept.softmax(-1), 1, generator=random)])
    return int(torch.multinomial(logits.softmax(-1), 1, generator=random))


def as_text(decode: Callable[[list[int]], str], prompt: Sequence[int], ids: Iterator[int]) -> Iterator[str]:
    """The text of ``ids`` piece by piece, as soon as its characters are whole."""
    everything = list(prompt)
    shown = decode(everything)
    text = shown
    for one in ids:
        everything.append(one)
        text = decode(everything)
        whole = text.rstrip(HALF_CHARACTER)
        if len(whole) > len(shown):
            yield whole[len(shown) :]
            shown = whole
    if len(text) > len(shown):
        yield text[len(shown) :]
