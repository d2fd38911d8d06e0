from __future__ import annotations

import json

import pytest

from merganser.checkpoints.sidecars import read_chat_template
from merganser.checkpoints.tokenizer import extend_tokenizer, make_added_token, read_tokens
from merganser.errors import CheckpointError


def test_every_kind_of_vocabulary_file(tmp_path):
    assert read_tokens(None) is None
    assert read_tokens(tmp_path) is None
    (tmp_path / "vocab.txt").write_text("[UNK]\nhello\n##ing\n")
    assert read_tokens(tmp_path).ids == {"[UNK]": 0, "hello": 1, "##ing": 2}
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 2}))
    found = read_tokens(tmp_path)
    assert found.ids == {"a": 0, "b": 1, "<x>": 2}
    assert not found.extensible
    unigram = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5]]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert read_tokens(tmp_path).ids == {"<unk>": 0, "▁a": 1}
    assert read_tokens(tmp_path).extensible


def test_vocabularies_are_cut_at_line_feeds_only(tmp_path):
    tokens = ["[UNK]", "a\u2028b", "\u0085", "\x0c", "\x1c", "last"]
    (tmp_path / "vocab.txt").write_bytes("\n".join(tokens).encode())
    assert read_tokens(tmp_path).ids == {token: i for i, token in enumerate(tokens)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "not a tokenizer"),
        ('{"model": {"vocab": 3}}', "not a tokenizer"),
    ],
)
def test_broken_files_are_named(tmp_path, text, message):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_tokens(tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (-1, "'b' has the id -1, which is not a row"),
        (10**9, "'b' has the id 1000000000, which is not a row of a vocabulary of"),
        (0, "'a' and 'b' have the same id 0"),
        (1.0, "'b' has the id 1.0; expected"),
        (True, "'b' has the id True; expected"),
        ("1", "'b' has the id '1'; expected"),
        (None, "'b' has the id None; expected"),
        ([1], r"'b' has the id \[1\]; expected"),
    ],
)
@pytest.mark.parametrize("place", ["vocab", "added", "vocab.json", "added_tokens.json"])
def test_ids_that_are_no_rows(tmp_path, bad, message, place):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3, "text_config": {"vocab_size": 5}}))
    if place in ("vocab", "added"):
        extra = {"added": [{"content": "b", "id": bad}], "vocab": []}[place]
        vocab = {"a": 0} | ({"b": bad} if place == "vocab" else {})
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": extra}))
    else:
        files = {"vocab.json": {"a": 0}, "added_tokens.json": {}}
        files[place]["b"] = bad
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_tokens(tmp_path)


def test_ids_may_leave_gaps_as_large_as_the_vocabulary(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 60_000}))
    assert read_tokens(tmp_path).ids["b"] == 60_000
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1_500_000}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 1_000_000}}))
    assert read_tokens(tmp_path).ids["b"] == 1_500_000


def test_pieces_that_are_no_texts(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.0], [3, 0.0]]}}')
    with pytest.raises(CheckpointError, match="the token 3 has the id 1; expected a text"):
        read_tokens(tmp_path)


def test_an_ordinary_token_of_another_model_matches_whole_words_only():
    assert make_added_token("hello", 7) == {
        "id": 7,
        "content": "hello",
        "single_word": True,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    assert make_added_token("<s>", 7, {"id": 1, "special": True, "lstrip": True})["lstrip"]
    before = {"added_tokens": [{"id": 1}], "model": {}}
    assert extend_tokenizer(before, [{"id": 2}])["added_tokens"] == [{"id": 1}, {"id": 2}]
    assert before["added_tokens"] == [{"id": 1}]


@pytest.mark.parametrize(("file", "read"), [("vocab.txt", read_tokens), ("chat_template.jinja", read_chat_template)])
def test_texts_of_another_encoding_are_refused_by_name(file, read, tmp_path):
    (tmp_path / file).write_bytes("naïve".encode("latin-1"))
    with pytest.raises(CheckpointError, match=f"{file}: not a text in UTF-8"):
        read(tmp_path)


def test_a_vocabulary_that_changed_is_read_again(tmp_path):
    file = tmp_path / "vocab.json"
    file.write_text(json.dumps({"a": 0}))
    assert read_tokens(tmp_path) is read_tokens(tmp_path)
    file.write_text(json.dumps({"a": 0, "b": 1}))
    assert dict(read_tokens(tmp_path).ids) == {"a": 0, "b": 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps({"c": 2}))
    assert len(read_tokens(tmp_path).ids) == 3
