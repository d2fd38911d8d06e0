"""The model in memory says what the merged checkpoint would say."""

from __future__ import annotations

import pytest

import merganser as mg
from merganser.errors import InputError
from merganser.studio.player import Player, Prompt
from merganser.studio.roots import Roots
from studio.conftest import MIX, events

PROMPT = {"text": "w1 w2 w3", "tokens": 6}


def said(found, index=0):
    return "".join(e["text"] for e in found if e["event"] == "token" and e["index"] == index)


def test_it_says_what_transformers_says_of_the_merged_checkpoint(client, folder, transformers):
    mg.run(
        {
            **MIX,
            "base": str(folder / "base"),
            "models": [{"path": str(folder / "math"), "weight": 0.5}, str(folder / "code")],
        },
        folder / "out",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").float()
    ids = tokenizer(PROMPT["text"], return_tensors="pt")["input_ids"]
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    before, whole = (tokenizer.decode(each[0], skip_special_tokens=True) for each in (ids, written))
    found = events(client.post("/api/play", json={"documents": [MIX], "prompt": PROMPT}))
    assert before + said(found) == whole


def test_only_what_changed_is_merged_again(client):
    deeper = {**MIX, "models": [{"path": "math", "weight": {"*.layers.1.*": 0.9, "*": 0.5}}, {"path": "code"}]}
    found = events(client.post("/api/play", json={"documents": [MIX, MIX, deeper]}))
    merged = [e["tensors"] for e in found if e["event"] == "merged"]
    assert merged[0] > merged[2] > merged[1] == 0


def test_several_models_and_what_each_thinks_of_the_words_of_the_first(client, folder, transformers):
    documents = [{"method": "passthrough", "models": [{"path": name}]} for name in ("math", "code")]
    found = events(client.post("/api/play", json={"documents": documents, "prompt": PROMPT, "compare": True}))
    first, second = ([p for _, p in e["tokens"]] for e in found if e["event"] == "likelihood")
    assert len(first) == len(second)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "code")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "code").float()
    before = tokenizer(PROMPT["text"], return_tensors="pt")["input_ids"]
    own = tokenizer(said(found), add_special_tokens=False, return_tensors="pt")["input_ids"]
    import torch

    ids = torch.cat([before, own], 1)
    logits = model(ids).logits.log_softmax(-1)[0, before.shape[1] - 1 : -1]
    assert second == pytest.approx(logits.gather(1, own.T)[:, 0].tolist(), abs=1e-4)


def test_losses_for_a_landscape(client):
    documents = [
        {"method": "linear", "models": [{"path": "math", "weight": 1 - x}, {"path": "code", "weight": x}]}
        for x in (0.0, 0.5, 1.0)
    ]
    found = events(client.post("/api/play", json={"documents": documents, "texts": ["w1 w2 w3 w4"]}))
    assert len([e["loss"] for e in found if e["event"] == "loss"]) == 3


def test_sampling_is_repeated_by_its_seed(client):
    prompt = {**PROMPT, "temperature": 1.5, "tokens": 12}
    texts = [
        said(events(client.post("/api/play", json={"documents": [MIX], "prompt": {**prompt, "seed": s}})))
        for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_the_latest_request_wins(folder):
    player = Player(Roots([folder]))
    first = player.play([MIX], Prompt("w1", tokens=50))
    next(first)
    second = player.play([MIX], Prompt("w1", tokens=2))
    assert next(second)["event"] == "merged"
    with pytest.raises(InputError, match="went to another page"):
        list(first)


def test_a_changed_file_is_read_again(client, folder):
    events(client.post("/api/play", json={"documents": [MIX]}))
    (folder / "math" / "model.safetensors").write_bytes((folder / "code" / "model.safetensors").read_bytes())
    [merged, _] = events(client.post("/api/play", json={"documents": [MIX]}))
    assert merged["tensors"] > 0


def test_memory_is_given_back(client):
    events(client.post("/api/play", json={"documents": [MIX]}))
    assert client.get("/api/home").json()["live"]["loaded"]
    assert client.delete("/api/play").json() == {"loaded": False}


def test_what_cannot_be_played_says_why(client, folder):
    (folder / "plain").mkdir()
    (folder / "plain" / "a.safetensors").write_bytes((folder / "math" / "model.safetensors").read_bytes())
    for document, message in (
        ({"method": "passthrough", "models": [{"path": "plain/a.safetensors"}]}, "needs a language model"),
        ({"method": "tiez", "models": [{"path": "math"}]}, "did you mean 'ties'"),
        ({"method": "linear", "models": [{"path": "../x"}]}, "outside of"),
    ):
        [error] = events(client.post("/api/play", json={"documents": [document]}))
        assert error["event"] == "error"
        assert message in error["message"]
    [error] = events(client.post("/api/play", json={"documents": [MIX], "prompt": {"text": ""}}))[-1:]
    assert "empty" in error["message"]


def test_a_model_without_a_tokenizer_is_named(client, folder):
    for file in (folder / "base").glob("*token*"):
        file.unlink()
    error = events(client.post("/api/play", json={"documents": [MIX], "prompt": {"text": "w1"}}))[-1]
    assert error["event"] == "error"
    assert error["message"].startswith("base: it has no tokenizer that transformers can load")
    assert client.get("/api/home").json()["live"] == {"loaded": False}


def test_questions_are_scored_as_evaluate_scores_them(client, folder, transformers):
    import numpy as np

    from merganser.evaluate.tasks import Task
    from merganser.evolve.intervals import score_interval

    alone = {"method": "passthrough", "models": [{"path": "math"}]}
    found = events(client.post("/api/play", json={"documents": [alone], "questions": {"path": "quiz.jsonl"}}))
    scores = [e for e in found if e["event"] == "score"]
    assert [e["count"] for e in scores] == [8, 16, 20], "the score refreshes as questions are answered"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "math").float()
    task = Task.parse(f"multiple-choice:{folder / 'quiz.jsonl'}")
    assert scores[-1]["value"] == pytest.approx(task.score(model, str(folder / "math")))
    interval = score_interval(np.array(scores[-1]["answers"]))
    assert (scores[-1]["low"], scores[-1]["high"]) == pytest.approx((interval.low, interval.high))
    few = {"path": "quiz.jsonl", "limit": 5}
    [*_, last, _] = events(client.post("/api/play", json={"documents": [alone], "questions": few}))
    assert last["answers"] == scores[-1]["answers"][:5], "a smaller sample is the beginning of a larger one"


def test_two_mixes_that_answered_the_same_are_told_apart_or_not(client):
    def verdict(left, right, **options):
        return client.post("/api/verdict", json={"left": left, "right": right, **options})

    ones, zeros = [1.0] * 30, [0.0] * 30
    assert verdict(ones, zeros).json()["verdict"] == "better"
    assert verdict(ones, zeros, lower_is_better=True).json()["verdict"] == "worse"
    assert verdict(ones[:3], [1.0, 0.0, 1.0]).json() | {"low": 0, "high": 0} == {
        "verdict": "cannot tell",
        "count": 3,
        "value": pytest.approx(1 / 3),
        "low": 0,
        "high": 0,
    }
    assert "the same questions" in verdict(ones, zeros[:4]).json()["error"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"foo": 1}\n', None, "no questions that are known by their fields"),
        ('{"text": "w1", "label": 0}\n', None, "are for text classifiers"),
        ('{"text": "w1"}\n', "judged", "unknown kind of questions"),
        ('{"question": "w1", "options": ["a", "b"], "answer": 7}\n', None, "must be a whole number from 0 below 2"),
    ],
)
def test_questions_that_cannot_be_asked_say_why(client, folder, text, kind, message):
    (folder / "odd.jsonl").write_text(text)
    body = {"documents": [MIX], "questions": {"path": "odd.jsonl", "kind": kind}}
    error = events(client.post("/api/play", json=body))[-1]
    assert error["event"] == "error"
    assert message in error["message"]
    outside = {"documents": [MIX], "questions": {"path": "../odd.jsonl"}}
    assert client.post("/api/play", json=outside).status_code == 403


class Pieced:
    """A tokenizer whose tokens lose their leading space when they are decoded alone."""

    words = ("▁Once", "▁upon", "\u00c3", "\u00a9")

    def decode(self, ids):
        whole = "".join(self.words[i] for i in ids).replace("\u00c3\u00a9", "é").replace("\u00c3", "\ufffd")
        return whole.replace("▁", " ").removeprefix(" ")


def test_tokens_keep_their_spaces_and_characters_their_bytes():
    from merganser.studio.player import split_pieces

    assert split_pieces(Pieced(), [0, 1, 2, 3]) == ["Once", " upon", "", "é"]
    assert split_pieces(Pieced(), []) == []
