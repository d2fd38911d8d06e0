"""The text zoo on a made-up language and a toy encoder: batches, leakage guard, head, training, resuming."""

from __future__ import annotations

import copy
from dataclasses import replace
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

from benchmarks.zoo import text, text_layers, text_tasks
from benchmarks.zoo.cards import default_data
from benchmarks.zoo.fine_tuning import start_head
from benchmarks.zoo.text_groups import CLINC150_DOMAINS, GROUPS
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


def toy_layers() -> ToyEncoder:
    encoder = ToyEncoder()
    encoder.embeddings.requires_grad_(False)
    return encoder


def sentences(lengths: list[int], seed: int = 0) -> Sentences:
    """Random sentences; the label says whether the token 3 occurs."""
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 20, length) for length in lengths]
    labels = torch.tensor([int((t == 3).any()) for t in tokens])
    return Sentences(np.concatenate(tokens), np.cumsum(lengths), labels)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(text, "load_encoder", ToyEncoder)
    monkeypatch.setattr(text, "load_top_layers", toy_layers)
    monkeypatch.setattr(text, "with_states", lambda sentences: sentences)
    monkeypatch.setattr(text, "TOKENISER_FILES", ())
    lengths = np.random.default_rng(1).integers(1, 9, 120).tolist()
    return Task("toy", 2, sentences(lengths), sentences(lengths[:20], 1), sentences(lengths[:60], 2))


class Interrupting:
    """Sentences that are scored once; the second time, someone stops the program."""

    def __init__(self, sentences: Sentences) -> None:
        self.sentences, self.scored = sentences, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sentences, name)

    def batches(self, size: int) -> Any:
        self.scored += 1
        if self.scored == 2:
            raise KeyboardInterrupt
        return self.sentences.batches(size)


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


def test_states_of_the_frozen_layers_stand_in_for_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers above, started from stored states, give what the whole encoder gives; other frozen weights do not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=384, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8
    )
    whole = transformers.BertModel(config, add_pooling_layer=False).eval()
    monkeypatch.setattr(text_layers, "load_encoder", lambda: copy.deepcopy(whole))
    text_layers._frozen.cache_clear()
    text_layers._shell.cache_clear()
    some = sentences([5, 1, 3, 8, 2])
    with_states = text_layers.with_states(some, batch=2)
    layers = text_layers.layers_from(whole.state_dict())
    for part, own in ((some, with_states), (some.slice(1, 4), with_states.slice(1, 4))):
        torch.testing.assert_close(text_tasks.encode(layers, own, batch=3), text_tasks.encode(whole, part))
    assert {name.split(".")[2] for name in layers.state_dict()} == {"3"}
    other = {name: value + 1 for name, value in whole.state_dict().items()}
    with pytest.raises(InputError, match="are frozen in these experts"):
        text_layers.layers_from(other)
    text_layers._frozen.cache_clear()
    text_layers._shell.cache_clear()


def test_head_starts_small_by_its_seed() -> None:
    head, same, other = (start_head(384, 5, 0.02, seed) for seed in (0, 0, 1))
    assert torch.equal(head.weight, same.weight)
    assert not torch.equal(head.weight, other.weight)
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not head.bias.any()


def test_expert_is_trained_saved_and_skipped(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = text.Schedule(epochs=2, rate=3e-2, batch=8)
    card = text.train(task, 0, schedule, tmp_path)
    directory = text.expert_directory(tmp_path, "toy")
    names = sorted(p.name for p in directory.iterdir())
    assert names == ["card.json", "epoch1", "head.safetensors", "model.safetensors"]
    base = ToyEncoder().state_dict()
    trained, first = (load_file(d / "model.safetensors") for d in (directory, directory / "epoch1"))
    assert torch.equal(trained["embeddings.weight"], base["embeddings.weight"])
    assert not torch.equal(trained["encoder.weight"], base["encoder.weight"])
    assert not torch.equal(trained["encoder.weight"], first["encoder.weight"])
    assert {"base_accuracy", "epoch1_accuracy", "test_accuracy"} == set(card.scores)
    assert not torch.equal(text.load_head("toy", 0, tmp_path)["weight"], start_head(8, 2, 0.02, 0).weight)
    encoder = ToyEncoder()
    for state, early, score in ((trained, False, "test"), (first, True, "epoch1")):
        encoder.load_state_dict(state)
        head = text.load_head("toy", 0, tmp_path, early)
        assert text_tasks.accuracy(encoder, head, task.test) == pytest.approx(card.scores[f"{score}_accuracy"])
    assert card.guards["base_share"] == card.scores["base_accuracy"] / card.scores["test_accuracy"]
    change = (trained["encoder.weight"] - base["encoder.weight"]).norm() / base["encoder.weight"].norm()
    assert card.guards["distances"] == {"encoder.weight": pytest.approx(float(change), abs=1e-4)}

    monkeypatch.setattr(text, "fine_tune", lambda *_, **__: pytest.fail("trained again"))
    assert text.train(task, 0, schedule, tmp_path).scores == card.scores
    with pytest.raises(InputError, match=r"trained with .*'rate': 0.03.* remove its directory"):
        text.train(task, 0, text.Schedule(epochs=2), tmp_path)


def test_an_interrupted_expert_ends_like_a_whole_one(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = text.Schedule(epochs=2, rate=3e-2, batch=8)
    text.train(task, 0, schedule, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        text.train(replace(task, test=Interrupting(task.test)), 0, schedule, tmp_path / "parts")
    assert (text.expert_directory(tmp_path / "parts", "toy") / "checkpoint.pt").exists()
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


def test_groups_divide_their_sets() -> None:
    for whole, classes in (("clinc150", 150), ("banking77", 77)):
        labels = [label for source, part in GROUPS.values() if source == whole for label in part]
        assert sorted(labels) == list(range(classes))
    assert {len(GROUPS[f"clinc150-{domain}"][1]) for domain in CLINC150_DOMAINS} == {15}


def test_no_set_of_tasks_has_a_task_twice_nor_a_whole_with_its_part() -> None:
    for count, names in text_tasks.TASK_SETS.items():
        assert len(set(names)) == len(names) == count
        assert not {GROUPS[name][0] for name in names if name in GROUPS} & set(names)


def test_a_group_has_its_own_labels_only(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    lines = [f"{label}\tsentence {label}" for label in range(77)]
    (tmp_path / "text" / "banking77.test.tsv").write_text("\n".join(lines) + "\n")
    labels = GROUPS["banking77-accounts"][1]
    rows = text_tasks.read_rows(tmp_path, "banking77-accounts", "test")
    assert sorted(rows) == [(place, f"sentence {label}") for place, label in enumerate(labels)]


@pytest.mark.skipif(not (default_data() / "text/clinc150.train.tsv").exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("name", "place", "word"),
    [("clinc150-travel", 4, "exchange"), ("clinc150-utility", 14, "weather"), ("banking77-transfers", 4, "cancel")],
)
def test_labels_mean_what_the_groups_say(name: str, place: int, word: str) -> None:
    """The files have numbers only; most sentences of an intent have its word."""
    rows = text_tasks.read_rows(default_data(), name, "train")
    own, other = (
        np.mean([word in sentence.lower() for label, sentence in rows if (label == place) is same])
        for same in (True, False)
    )
    assert own > 0.3 > 3 * other


def test_unknown_task_suggests() -> None:
    with pytest.raises(InputError, match="banking77"):
        text_tasks.load_task("banking", Path("."), Path("."))
