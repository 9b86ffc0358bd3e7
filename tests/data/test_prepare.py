"""Preparing: every source gives the same tokens, once, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from koushi.data import prepare as prepare_module
from koushi.data import progress
from koushi.data.cache import Record, cache_folder
from koushi.data.prepare import prepare
from koushi.data.samples import Packed
from koushi.data.tokenizer import EMBEDDED, Encoder
from koushi.data.tokens import TokenFiles
from koushi.errors import DataError
from koushi.job import Job

MakeJob = Callable[..., Job]

DOCUMENTS = ["The first document.\n", "格子 means lattice 🙂", "x", "", "Four score\nand seven " * 30]


def tokens_of(job: Job) -> list[int]:
    corpus = prepare(job)
    return list(map(int, corpus.tokens.read(0, len(corpus.tokens))))


def expected() -> list[int]:
    tokenizer = Encoder(EMBEDDED).tokenizer
    return [number for text in DOCUMENTS if text for number in [*tokenizer.encode(text).ids, 1]]


def write_sources(base: Path) -> None:
    (base / "text").mkdir()
    for number, document in enumerate(DOCUMENTS):
        (base / "text" / f"{number}.txt").write_text(document, encoding="utf-8", newline="")
    (base / "rows.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), base / "rows.parquet")
    ids = expected()
    for width in ("uint16", "uint32"):
        (base / width).mkdir()
        np.array(ids[:100], f"<u{2 if width == 'uint16' else 4}").tofile(base / width / "0.bin")
        (base / width / "1.bin").touch()
        np.array(ids[100:], f"<u{2 if width == 'uint16' else 4}").tofile(base / width / "2.bin")


def test_every_source_gives_the_same_tokens(tmp_path: Path, make_job: MakeJob) -> None:
    write_sources(tmp_path)
    jobs = [
        make_job(source="text", path="text"),
        make_job(source="jsonl", path="rows.jsonl"),
        make_job(source="parquet", path="rows.parquet"),
        make_job(source="tokens", path="uint16", end_of_document_id=1),
        make_job(source="tokens", path="uint32", token_dtype="uint32", end_of_document_id=1),
    ]
    for job in jobs:
        assert tokens_of(job) == expected()
        assert prepare(job).end_of_document_id == 1
    assert len({prepare(job).digest for job in jobs}) == 1


def test_small_groups_and_many_threads_change_nothing(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sources(tmp_path)
    monkeypatch.setattr(prepare_module, "GROUP_CHARACTERS", 3)
    monkeypatch.setattr(prepare_module.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(prepare_module, "MOST_THREADS", 1)
    assert tokens_of(make_job(source="text", path="text")) == expected()


@pytest.mark.usefixtures("embedded_cache")
def test_embedded_corpus(make_job: MakeJob) -> None:
    corpus = prepare(make_job())
    assert len(corpus.tokens) > 200_000
    ids = corpus.tokens.read(0, len(corpus.tokens))
    assert 1 < (ids == corpus.end_of_document_id).sum() < len(ids) / 100
    assert ids[-1] == corpus.end_of_document_id
    assert ids.max() < 2048
    assert "TOKENIZERS_PARALLELISM" not in os.environ or os.environ["TOKENIZERS_PARALLELISM"] != "false"


def test_made_once_and_again_when_something_changes(
    tmp_path: Path, make_job: MakeJob, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    tokenise = prepare_module._tokenise

    def counted(*args: Any) -> Record:
        made.append(1)
        return tokenise(*args)

    monkeypatch.setattr(prepare_module, "_tokenise", counted)
    (tmp_path / "a.txt").write_text("one two three")
    job = make_job(source="text", path="a.txt")
    assert tokens_of(job) == tokens_of(job)
    prepare(make_job(seq_len=5, source="text", path="a.txt"))
    assert len(made) == 1

    (tmp_path / "a.txt").write_text("one two 3!!!!")
    tokens_of(job)
    assert len(made) == 2

    (tmp_path / "other.json").write_text(EMBEDDED.read_text() + " ")
    tokens_of(make_job(source="text", path="a.txt", tokenizer="other.json"))
    assert len(made) == 3
    assert sorted(file.suffix for file in cache.iterdir()) == [".bin"] * 3 + [".json"] * 3 + [".lock"] * 3


@pytest.mark.parametrize("suffix", [".bin", ".json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "nonsense"])
def test_a_damaged_cache_is_made_again(
    tmp_path: Path, make_job: MakeJob, cache: Path, suffix: str, damage: str
) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    job = make_job(source="text", path="a.txt")
    before = tokens_of(job)
    [file] = cache.glob(f"*{suffix}")
    content = file.read_bytes()
    match damage:
        case "cut":
            file.write_bytes(content[:-1])
        case "empty":
            file.write_bytes(b"")
        case "gone":
            file.unlink()
        case "nonsense":
            file.write_bytes(b'{"count": 3}')
    assert tokens_of(job) == before
    assert file.read_bytes() == content


def test_what_a_crash_leaves_is_no_entry(tmp_path: Path, make_job: MakeJob, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    job = make_job(source="text", path="a.txt")
    before = tokens_of(job)
    [record] = cache.glob("*.json")
    [tokens] = cache.glob("*.bin")
    record.unlink()
    tokens.rename(tokens.with_name(tokens.name + ".part"))
    (cache / f"{record.name}.part").write_text("{")
    assert tokens_of(job) == before
    assert not list(cache.glob("*.part"))


def test_many_processes_at_once(tmp_path: Path, make_job: MakeJob, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 20_000)
    body = tmp_path / "body.py"
    body.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]\n"
        "from koushi.config.schema import JobConfig\n"
        "from koushi.data import prepare as module\n"
        "from koushi.job import Job\n"
        "from koushi.mesh import MeshSpec\n"
        "from koushi.models.llama.sizes import llama_size\n"
        "config = JobConfig.model_validate({'data': {'source': 'text', 'path': 'a.txt'}})\n"
        f"job = Job(config, llama_size(config.model), MeshSpec.of(), (range(6),), 'x', Path({str(tmp_path)!r}))\n"
        "made = []\n"
        "tokenise = module._tokenise\n"
        "module._tokenise = lambda *args: (made.append(1), tokenise(*args))[1]\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "corpus = module.prepare(job)\n"
        "print(len(made), len(corpus.tokens), corpus.digest)\n"
    )
    workers = [
        subprocess.Popen([sys.executable, str(body)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    outputs = []
    for worker in workers:  # all wait at the start until here
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        outputs.append(worker.communicate()[0].split())
        assert worker.returncode == 0
    assert sorted(made for made, _, _ in outputs) == ["0", "0", "0", "1"]
    assert len({tuple(rest) for _, *rest in outputs}) == 1
    assert prepare(make_job(source="text", path="a.txt")).digest == outputs[0][2]


def test_a_cache_that_cannot_be_written(tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KOUSHI_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "a.txt").write_text("one two three")
    with pytest.raises(DataError, match=r"the cache folder .*file/cache cannot be used .*set KOUSHI_CACHE"):
        prepare(make_job(source="text", path="a.txt"))


def test_a_full_disk(tmp_path: Path, make_job: MakeJob, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("one two three")
    monkeypatch.setattr(prepare_module.os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device.*set KOUSHI_CACHE"):
        prepare(make_job(source="text", path="a.txt"))
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("KOUSHI_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "koushi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "koushi"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "koushi"


def test_faults_in_a_source_leave_no_entry(tmp_path: Path, make_job: MakeJob, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: the field 'text' holds a number"):
        prepare(make_job(source="jsonl", path="a.jsonl"))
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 7), ("uint32", 6)])
def test_token_file_of_broken_size(tmp_path: Path, make_job: MakeJob, dtype: str, size: int) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"a\.bin: {size} bytes are not a whole number of {dtype} tokens"):
        prepare(make_job(source="tokens", path="a.bin", token_dtype=dtype))


def test_token_ids_outside_the_vocabulary(tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "SCAN", 4)
    np.array([1, 2, 3], "<u2").tofile(tmp_path / "a.bin")
    np.array([4, 5, 6, 7, 8, 2048, 2048], "<u2").tofile(tmp_path / "b.bin")
    message = r"b\.bin: token 5: id 2048 is outside the model's vocabulary; ids must be below model.vocab_size 2048"
    for _ in range(2):  # once scanned, once out of the cache
        with pytest.raises(DataError, match=message):
            prepare(make_job(source="tokens", path="*.bin"))
    assert len(prepare(make_job(source="tokens", path="*.bin", sections={"model": {"vocab_size": 2049}})).tokens) == 10


def test_tokenizer_larger_than_the_model(tmp_path: Path, make_job: MakeJob) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    small = make_job(source="text", path="a.txt", sections={"model": {"vocab_size": 2047}})
    with pytest.raises(DataError, match=r"has ids up to 2047; model.vocab_size is 2047 and must be at least 2048"):
        prepare(small)
    prepare(make_job(source="text", path="a.txt"))
    with pytest.raises(DataError, match="must be at least 2048"):  # out of the cache as well
        prepare(small)


def test_end_of_document_outside_the_vocabulary(tmp_path: Path, make_job: MakeJob) -> None:
    np.array([1, 2, 3], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"data.end_of_document_id: 5000 is outside .* must be below 2048"):
        prepare(make_job(source="tokens", path="a.bin", end_of_document_id=5000))


def test_large_vocabularies_are_kept_in_32_bits(tmp_path: Path, make_job: MakeJob) -> None:
    content = json.loads(EMBEDDED.read_text())
    content["model"]["vocab"]["a word that never comes"] = 70_000
    (tmp_path / "t.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("one two three")
    job = make_job(source="text", path="a.txt", tokenizer="t.json", sections={"model": {"vocab_size": 70_001}})
    assert tokens_of(job) == tokens_of(make_job(source="text", path="a.txt"))
    sizes = sorted(file.stat().st_size for file in cache_folder().glob("*.bin"))
    assert sizes[1] == 2 * sizes[0]


def test_token_files_are_one_run(tmp_path: Path) -> None:
    parts = [[0, 1, 2], [], [3], [4, 5]]
    files = [tmp_path / f"{number}.bin" for number in range(4)]
    for file, part in zip(files, parts, strict=True):
        np.array(part, "<u2").tofile(file)
    tokens = TokenFiles(files, "uint16")
    assert len(tokens) == 6
    for start in range(7):
        for stop in range(start, 7):
            assert tokens.read(start, stop).tolist() == list(range(start, stop))
    assert tokens.read(0, 6).dtype == np.int64
    assert tokens.place(3) == f"{files[2]}: token 0"


@pytest.mark.parametrize("content", ["", "one two"])
def test_less_than_one_sample(tmp_path: Path, make_job: MakeJob, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    tokens = prepare(make_job(source="text", path="a.txt")).tokens
    with pytest.raises(DataError, match=f"holds {len(tokens)} tokens, fewer than one sample of training.seq_len 50"):
        Packed(tokens, seq_len=50)


def test_progress_only_when_it_takes_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = progress.Progress("tokenising")
    for now in (1.0, 1.9, 2.1, 5.0, 6.2, 13.0):
        shown.update(int(now * 1000), "a.txt")
    assert capsys.readouterr().err.splitlines() == [
        "koushi: tokenising: 2.10K tokens after 2.1s, now at a.txt",
        "koushi: tokenising: 6.20K tokens after 6.2s, now at a.txt",
    ]
