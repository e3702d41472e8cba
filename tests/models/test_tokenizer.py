"""Tokenizers: a folder's, GPT-2's from its merges, and those that do not fit."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from zerojax.models.tokenizer import gpt2_tokenizer, load_tokenizer

VOCAB_BPE = Path(__file__).parents[3] / "shared" / "data" / "gpt2_vocab.bpe"
MERGES = "#version: 0.2\nĠ t\nh e\nĠt he\n"
TEXT = "the thé the\n"
IDS = [83, 257, 256, 71, 127, 102, 258, 198]  # t, he, Ġt, h, é's two bytes, Ġthe, newline


@pytest.fixture
def merges(tmp_path: Path) -> Path:
    (tmp_path / "vocab.bpe").write_text(MERGES, encoding="utf-8")
    return tmp_path / "vocab.bpe"


def test_ids_follow_from_the_merges(merges: Path) -> None:
    tokenizer = gpt2_tokenizer(merges, vocab_size=260)
    assert tokenizer.encode(TEXT).ids == IDS
    assert tokenizer.decode(IDS) == TEXT
    assert tokenizer.encode("<|endoftext|>").ids == [259]


@pytest.mark.skipif(not VOCAB_BPE.exists(), reason=f"{VOCAB_BPE} is not there: no merges of GPT-2")
def test_ids_are_gpt2s() -> None:
    """Those of `encoder.json`, and of the example in GPT-2's documentation of transformers."""
    tokenizer = gpt2_tokenizer(VOCAB_BPE, vocab_size=50257)
    assert tokenizer.get_vocab_size() == 50257
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.encode(" Hello world<|endoftext|>").ids == [18435, 995, 50256]


def test_a_folder_has_its_own(merges: Path) -> None:
    gpt2_tokenizer(merges).save(str(merges.parent / "tokenizer.json"))
    for path in (merges.parent, merges.parent / "tokenizer.json"):
        assert load_tokenizer(path, vocab_size=260).encode(TEXT).ids == IDS


def test_ids_beyond_the_vocabulary_are_refused(merges: Path) -> None:
    with pytest.raises(ValueError, match=r"does not fit the model: 4 ids, up to 259 .* = 256"):
        gpt2_tokenizer(merges, vocab_size=256)
    gpt2_tokenizer(merges).save(str(merges.parent / "tokenizer.json"))
    with pytest.raises(
        ValueError, match=r"tokenizer.json does not fit .* vocab_size = 260 or more"
    ):
        load_tokenizer(merges.parent, vocab_size=259)


def test_files_that_are_none_are_named(merges: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json does not exist.*save_pretrained"):
        load_tokenizer(merges.parent)
    with pytest.raises(ValueError, match=r"vocab.bpe is not a tokenizer's file"):
        load_tokenizer(merges)
    merges.write_text(MERGES + "Ġthe re\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab.bpe:5: 'Ġthe re' does not merge two symbols"):
        gpt2_tokenizer(merges)


def test_without_the_library_the_extra_is_named(
    merges: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[text\]'"):
        gpt2_tokenizer(merges)
