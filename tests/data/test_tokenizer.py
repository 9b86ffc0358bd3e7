from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from koushi.data import embedded, train_tokenizer
from koushi.data.tokenizer import (
    BEGIN_OF_TEXT,
    EMBEDDED,
    END_OF_TEXT,
    Encoder,
    file_digest,
    tokenizer_path,
)
from koushi.errors import DataError


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(EMBEDDED)


def test_size_and_special_tokens(encoder: Encoder) -> None:
    assert encoder.vocab_size == 2048
    assert encoder.tokenizer.get_vocab_size() == 2048
    assert encoder.tokenizer.token_to_id(BEGIN_OF_TEXT) == 0
    assert encoder.end_id == encoder.tokenizer.token_to_id(END_OF_TEXT) == 1


@given(st.text())
def test_any_text_comes_back(encoder: Encoder, text: str) -> None:
    ids = encoder.encode([text], [False]).tolist()
    assert all(1 < number < 2048 for number in ids)
    assert encoder.decode(ids) == text


def test_every_byte_has_a_token(encoder: Encoder) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert all(encoder.tokenizer.token_to_id(letter) is not None for letter in alphabet)


def test_english_takes_few_tokens(encoder: Encoder) -> None:
    text = "The function returns a list of the names that are defined in the module."
    assert len(encoder.encode([text], [False])) < len(text) / 3


def test_text_that_spells_a_special_token_ends_nothing(encoder: Encoder) -> None:
    ids = encoder.encode([f"a{END_OF_TEXT}b{BEGIN_OF_TEXT}"], [True]).tolist()
    assert ids.count(1) == 1
    assert ids[-1] == 1
    assert 0 not in ids
    assert encoder.decode(ids) == f"a{END_OF_TEXT}b{BEGIN_OF_TEXT}{END_OF_TEXT}"


def test_ends_only_where_asked(encoder: Encoder) -> None:
    whole = encoder.encode(["one\n", "two"], [False, True]).tolist()
    assert whole == [*encoder.encode(["one\n"], [False]), *encoder.encode(["two"], [False]), 1]


def test_training_is_reproducible(embedded_documents: list[str]) -> None:
    text = train_tokenizer.as_json(train_tokenizer.train(embedded_documents))
    if train_tokenizer.corpus_digest(embedded_documents) == train_tokenizer.CORPUS_DIGEST:
        assert text == EMBEDDED.read_text(encoding="utf-8")
    else:  # another Python, another corpus: then only that it comes out the same twice
        assert text == train_tokenizer.as_json(train_tokenizer.train(embedded_documents))


def test_check_writes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = EMBEDDED.read_bytes()
    monkeypatch.setattr(embedded, "documents", lambda: iter(["some text"]))
    assert train_tokenizer.main(["--check"]) == 2
    assert "nothing to compare" in capsys.readouterr().out
    monkeypatch.setattr(train_tokenizer, "CORPUS_DIGEST", train_tokenizer.corpus_digest(["some text"]))
    assert train_tokenizer.main(["--check"]) == 1
    assert EMBEDDED.read_bytes() == before


def make_tokenizer(path: Path, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.mark.parametrize("name", ["</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"])
def test_finds_the_usual_names(tmp_path: Path, name: str) -> None:
    make_tokenizer(tmp_path / "t.json", ["<pad>", "<other>", name])
    assert Encoder(tmp_path / "t.json").end_id == 2


def test_the_likeliest_name_wins(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t.json", ["</s>", "<|end_of_text|>"])
    assert Encoder(tmp_path / "t.json").end_id == 1


def test_no_end_token(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t.json", ["<pad>"])
    message = r"t\.json has no added token that ends a document.*<\|end_of_text.*set data\.end_of_document_id"
    with pytest.raises(DataError, match=message):
        Encoder(tmp_path / "t.json")
    assert Encoder(tmp_path / "t.json", end_id=0).end_id == 0


def test_settings_of_inference_are_put_aside(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t.json", ["</s>"])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "t.json"))
    assert len(Encoder(tmp_path / "t.json").encode(["abcdefgh"], [False])) == 8


def test_highest_id_counts_not_how_many(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t.json", ["</s>"])
    content = json.loads((tmp_path / "t.json").read_text())
    content["model"]["vocab"]["~"] = 999
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert Encoder(tmp_path / "t.json").vocab_size == 1000


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 3}'])
def test_no_tokenizer_at_all(tmp_path: Path, content: str) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(DataError, match=r"t\.json is not a Hugging Face tokenizer\.json"):
        Encoder(file)


def test_paths(tmp_path: Path) -> None:
    assert tokenizer_path("embedded", tmp_path) == EMBEDDED
    with pytest.raises(DataError, match=r"data\.tokenizer: there is no file .*missing.json"):
        tokenizer_path("missing.json", tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert tokenizer_path("model", tmp_path) == tmp_path / "model" / "tokenizer.json"
    assert file_digest(EMBEDDED) != file_digest(tmp_path / "model" / "tokenizer.json")
    with pytest.raises(DataError, match="cannot be read"):
        file_digest(tmp_path)
