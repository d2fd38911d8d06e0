"""The text zoo on a made-up language and a toy encoder: batches, leakage guard, head, training, resuming."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.zoo import text, text_tasks
from benchmarks.zoo.text_tasks import Sentences, Task
from merganser.errors import InputError


class ToyEncoder(nn.Module):
    """Frozen embeddings and one trained layer, with the interface of a transformers encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embeddings = nn.Embedding(20, 8)
        self.encoder = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=torch.tanh(self.encoder(self.embeddings(input_ids))))

    def save_pretrained(self, directory: Path) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), Path(directory) / "model.safetensors")


def sentences(lengths: list[int], seed: int = 0) -> Sentences:
    """Random sentences; the label says whether the token 3 occurs."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 20, length) for length in lengths]
    labels = torch.tensor([int((t == 3).any()) for t in tokens])
    return Sentences(np.concatenate(tokens), np.cumsum(lengths), labels)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(text, "load_encoder", ToyEncoder)
    monkeypatch.setattr(text, "TOKENISER_FILES", ())
    lengths = np.random.default_rng(1).integers(1, 9, 120).tolist()
    return Task("toy", 2, sentences(lengths), sentences(lengths[:20], 1), sentences(lengths[:60], 2))


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=60)


@given(lengths, st.integers(1, 9), st.booleans())
def test_batches_cover_every_sentence_once(lengths: list[int], size: int, shuffled: bool) -> None:
    generator = torch.Generator().manual_seed(0) if shuffled else None
    batches = list(sentences(lengths).batches(size, generator))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert max(map(len, batches)) <= size


@given(lengths)
def test_padding_and_slices_keep_the_tokens(lengths: list[int]) -> None:
    whole = sentences(lengths)
    spans = np.split(whole.tokens, whole.ends[:-1])
    batch = whole.padded(np.arange(len(lengths)))
    for ids, mask, span in zip(batch["input_ids"], batch["attention_mask"], spans, strict=True):
        assert ids[mask.bool()].tolist() == span.tolist()
        assert not ids[~mask.bool()].any()
    half = len(lengths) // 2
    part = whole.slice(half, len(lengths))
    assert part.tokens.tolist() == np.concatenate([[], *spans[half:]]).tolist()
    assert part.labels.tolist() == whole.labels[half:].tolist()


@given(lengths, st.integers(0, 200))
def test_budget_is_the_longest_prefix_that_fits(lengths: list[int], budget: int) -> None:
    part = sentences(lengths).within(budget)
    assert sum(lengths[: len(part)]) <= budget
    assert len(part) == len(lengths) or sum(lengths[: len(part) + 1]) > budget


def test_encode_returns_features_in_the_order_of_the_sentences() -> None:
    some = sentences([5, 1, 3, 8, 2])
    encoder = ToyEncoder()
    features = text_tasks.encode(encoder, some, batch=2)
    for i, span in enumerate(np.split(some.tokens, some.ends[:-1])):
        hidden = torch.tanh(encoder.encoder(encoder.embeddings(torch.from_numpy(span))))
        torch.testing.assert_close(features[i], hidden.mean(0))


def test_head_is_the_minimum_of_the_penalised_likelihood() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(90, 4)).astype(np.float32), rng.integers(0, 3, 90)
    decay = 1e-2
    head = text.fit_head(torch.from_numpy(features), torch.from_numpy(labels), 3, decay)
    reference = linear_model.LogisticRegression(C=1 / (2 * decay * 90), tol=1e-8, max_iter=1000).fit(features, labels)
    np.testing.assert_allclose(head["weight"].numpy(), reference.coef_, atol=2e-3)


def test_expert_is_trained_saved_and_skipped(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = text.train(task, 0, text.Schedule(epochs=2, rate=3e-2, batch=8), tmp_path)
    directory = text.expert_directory(tmp_path, "toy")
    names = sorted(p.name for p in directory.iterdir())
    assert names == ["card.json", "epoch1", "head.safetensors", "model.safetensors"]
    base = ToyEncoder().state_dict()
    trained, first = (load_file(d / "model.safetensors") for d in (directory, directory / "epoch1"))
    assert torch.equal(trained["embeddings.weight"], base["embeddings.weight"])
    assert not torch.equal(trained["encoder.weight"], base["encoder.weight"])
    assert not torch.equal(trained["encoder.weight"], first["encoder.weight"])
    assert {"base_accuracy", "epoch1_accuracy", "test_accuracy"} == set(card.scores)
    encoder = ToyEncoder()
    encoder.load_state_dict(trained)
    head = text.load_head("toy", 0, tmp_path)
    assert text_tasks.accuracy(encoder, head, task) == pytest.approx(card.scores["test_accuracy"])

    monkeypatch.setattr(text, "_epoch", lambda *_: pytest.fail("trained again"))
    assert text.train(task, 0, text.Schedule(epochs=2), tmp_path).scores == card.scores


def test_an_interrupted_expert_ends_like_a_whole_one(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = text.Schedule(epochs=2, rate=3e-2, batch=8)
    text.train(task, 0, schedule, tmp_path / "whole")
    epoch = text._epoch

    def interrupted(*arguments: Any) -> float:
        if arguments[6] == 2:
            raise KeyboardInterrupt
        return epoch(*arguments)

    monkeypatch.setattr(text, "_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text.train(task, 0, schedule, tmp_path / "parts")
    monkeypatch.setattr(text, "_epoch", epoch)
    text.train(task, 0, schedule, tmp_path / "parts")
    whole, parts = (
        load_file(text.expert_directory(tmp_path / name, "toy") / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_training_sentences_found_in_any_test_set_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "text").mkdir()
    for name in text_tasks.TASKS:
        (tmp_path / "text" / f"{name}.train.tsv").write_text("0\tgood film\n1\tbad film\n0\tfine plot\n")
        (tmp_path / "text" / f"{name}.test.tsv").write_text("1\tbad plot\n" if name != "sst2" else "1\tBad , film .\n")
    words = {word: i for i, word in enumerate(["[UNK]", "good", "bad", "fine", "film", "plot"])}
    tokeniser = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokeniser.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokeniser.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(text_tasks, "base_directory", lambda: tmp_path)
    monkeypatch.setattr(text_tasks, "VALIDATION", 1)
    task = text_tasks.load_task("mr", tmp_path, tmp_path / "cache")
    assert len(task.train) + len(task.validation) == 2
    assert words["bad"] not in [*task.train.tokens, *task.validation.tokens]
    assert task.test.tokens.tolist() == [words["bad"], words["plot"]]


def test_unknown_task_suggests() -> None:
    with pytest.raises(InputError, match="banking77"):
        text_tasks.load_task("banking", Path("."), Path("."))
