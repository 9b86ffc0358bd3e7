"""Choosing tokens, and text that appears as its characters become whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from koushi.data.tokenizer import EMBEDDED, Encoder
from koushi.generate.sample import Sampling, as_text, choose, continuation
from koushi.models.llama.model import Llama
from koushi.models.llama.sizes import LlamaSize

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])


def sampling(temperature: float = 1.0, top_k: int | None = None, seed: int = 0, max_tokens: int = 5) -> Sampling:
    return Sampling(max_tokens, temperature, top_k, seed)


def shares(one: Sampling, count: int = 4000) -> list[float]:
    random = torch.Generator().manual_seed(0)
    drawn = Counter(choose(LOGITS, one, random) for _ in range(count))
    return [drawn[index] / count for index in range(4)]


def test_without_temperature_the_likeliest_is_taken() -> None:
    assert shares(sampling(0.0), 20) == [0, 1, 0, 0]
    assert shares(sampling(0.7, top_k=1), 20) == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_ids_are_drawn_by_their_probability(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1).tolist()
    assert shares(sampling(temperature)) == pytest.approx(expected, abs=0.03)
    assert shares(sampling(temperature, top_k=9)) == pytest.approx(expected, abs=0.03)


def test_top_k_leaves_the_unlikely_out() -> None:
    expected = LOGITS[1:3].softmax(-1).tolist()
    assert shares(sampling(top_k=2)) == pytest.approx([0, *expected, 0], abs=0.03)


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    size = LlamaSize(vocab_size=16, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=8)
    model = Llama(size, 8)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def test_a_continuation_is_that_of_a_plain_loop(model: Llama) -> None:
    found = list(continuation(model, [3, 4], sampling(0.0, max_tokens=6), (), 16))
    ids = [3, 4]
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert found == ids[2:]


def test_the_seed_decides(model: Llama) -> None:
    def draw(seed: int) -> list[int]:
        return list(continuation(model, [3], sampling(seed=seed, max_tokens=20), (), 16))

    assert draw(1) == draw(1) != draw(2)


def test_a_stop_id_ends_it_and_is_left_out(model: Llama) -> None:
    whole = list(continuation(model, [3], sampling(max_tokens=20), (), 16))
    stop = whole[7]
    assert list(continuation(model, [3], sampling(max_tokens=20), {stop}, 16)) == whole[: whole.index(stop)]


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn(model: Llama) -> None:
    drawn = set(continuation(model, [3], sampling(5.0, max_tokens=100), (), 4))
    assert drawn == {0, 1, 2, 3}


def test_text_comes_in_whole_characters() -> None:
    encoder = Encoder(EMBEDDED)
    text = "caf\u00e9 \u683c\u5b50, \U0001f600!"
    ids = encoder.encode([text], [False]).tolist()
    prompt = encoder.encode(["a "], [False]).tolist()
    pieces = list(as_text(encoder.decode, prompt, iter(ids)))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    encoder = Encoder(EMBEDDED)
    half = encoder.encode(["\u683c"], [False]).tolist()[:1]
    assert "".join(as_text(encoder.decode, [], iter([*half]))) == "\ufffd"
