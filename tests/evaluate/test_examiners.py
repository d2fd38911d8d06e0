from __future__ import annotations

import json
import math
import pickle

import pytest
import torch

from merganser.errors import InputError, MerganserError
from merganser.evaluate import examiners
from merganser.evaluate.examiners import (
    Classification,
    Function,
    Generation,
    Loader,
    MultipleChoice,
    Perplexity,
    extracted,
    read_records,
    share_of_script,
)


@pytest.fixture(scope="module")
def model(llamas):
    return Loader("causal-lm", str(llamas / "math"))().eval()


def log_likelihood(model, tokens):
    """One sequence at a time, no padding: log p of each token after the first."""
    with torch.no_grad():
        logs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [float(logs[i, token]) for i, token in enumerate(tokens[1:])]


def test_multiple_choice_picks_the_likeliest_option(llamas, model):
    quiz = MultipleChoice(str(llamas / "quiz.jsonl"), str(llamas / "base"), batch=2)
    tokenizer = examiners.tokenizer_at(str(llamas / "base"))
    records = read_records(llamas / "quiz.jsonl")
    expected = []
    for record in records[:10]:
        prompt = f"Question: {record['question']}\nAnswer:"
        start = len(tokenizer(prompt)["input_ids"])
        scores = []
        for option in record["options"]:
            logs = log_likelihood(model, tokenizer(f"{prompt} {option}")["input_ids"])
            scores.append(sum(logs[start - 1 :]) / len(option))
        expected.append(float(scores.index(max(scores)) == record["answer"]))
    with torch.inference_mode():
        assert quiz(model, list(range(10)))["score"] == expected
        assert quiz(model, [4, 2])["score"] == [expected[4], expected[2]]
    assert 0 < sum(quiz(model, list(range(60)))["score"]) < 60


def test_long_prompts_lose_their_beginning_not_their_question(llamas, model):
    """64 tokens fit the model: the options stay whole, and are asked after the end of the prompt."""
    tokenizer = examiners.tokenizer_at(str(llamas / "base"))
    records = [r | {"context": "w1 w2 w3 w4 w5 " * 40} for r in read_records(llamas / "quiz.jsonl")[:8]]
    expected = []
    for record in records:
        prompt = f"{record['context']}\nQuestion: {record['question']}\nAnswer:"
        scores = []
        for option in record["options"]:
            logs = log_likelihood(model, tokenizer(f"{prompt} {option}")["input_ids"][-64:])
            scores.append(sum(logs[-len(option.split()) :]) / len(option))
        expected.append(float(scores.index(max(scores)) == record["answer"]))
    quiz = MultipleChoice(records, str(llamas / "base"))
    with torch.inference_mode():
        assert quiz(model, range(8))["score"] == expected
    assert len({record["answer"] for record in records}) == 3
    asked = []
    sums = Generation([r | {"answer": "1"} for r in records], str(llamas / "base"), max_new_tokens=4)

    class Listener(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.weight = model.config, torch.nn.Parameter(torch.zeros(1))

        def generate(self, input_ids, **options):
            asked.extend(input_ids.tolist())
            return input_ids

    sums(Listener(), range(8))
    prompts = [f"{r['context']}\nQuestion: {r['question']}\nAnswer:" for r in records]
    assert asked == [tokenizer(prompt)["input_ids"][-60:] for prompt in prompts]


def test_what_does_not_fit_a_sequence_is_refused(llamas, model):
    records = read_records(llamas / "quiz.jsonl")[:2]
    records[1]["options"] = ["w1", "w2 " * 70]
    quiz = MultipleChoice(records, str(llamas / "base"))
    with torch.inference_mode():
        assert len(quiz(model, [0])["score"]) == 1
        with pytest.raises(InputError, match=r"record 1: an option has 70 tokens .* the 64 of a sequence"):
            quiz(model, [0, 1])
        with pytest.raises(InputError, match="leaves no room for a prompt in 64 tokens"):
            Generation(str(llamas / "sums.jsonl"), str(llamas / "base"), max_new_tokens=64)(model, [0])
    assert MultipleChoice(records, str(llamas / "base"), max_length=9).limit(model) == 9
    assert quiz.limit(torch.nn.Linear(1, 1)) == examiners.LONGEST


def test_perplexity_is_the_mean_over_tokens(llamas, model):
    texts = Perplexity(str(llamas / "texts.tsv"), str(llamas / "base"), batch=3)
    tokenizer = examiners.tokenizer_at(str(llamas / "base"))
    records = read_records(llamas / "texts.tsv")
    with torch.inference_mode():
        found = texts(model, [0, 5, 7, 9])["score"]
    for item, value in zip([0, 5, 7, 9], found, strict=True):
        logs = log_likelihood(model, tokenizer(records[item]["text"])["input_ids"])
        assert value == pytest.approx(-sum(logs) / len(logs), abs=1e-4)


def test_generation_compares_the_last_number(llamas, model):
    sums = Generation(str(llamas / "sums.jsonl"), str(llamas / "base"), max_new_tokens=6, script="LATIN", batch=4)
    with torch.inference_mode():
        measures = sums(model, list(range(8)))
        alone = sums(model, [3])
    assert set(measures) == {"score", "length", "language"}
    assert all(0 < n <= 6 for n in measures["length"])
    assert measures["score"][3] == alone["score"][0], "padding must not change an answer"


def test_classification(llamas, model):
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, attention_mask):
            class Output:
                logits = torch.stack([input_ids[:, 0] % 2, torch.full_like(input_ids[:, 0], 0.5)], 1).double()

            Output.logits[:, 1] = 0.5
            return Output

    texts = Classification(str(llamas / "texts.tsv"), str(llamas / "base"), batch=7)
    tokenizer = examiners.tokenizer_at(str(llamas / "base"))
    records = read_records(llamas / "texts.tsv")
    expected = []
    for record in records:
        predicted = 0 if tokenizer(record["text"])["input_ids"][0] % 2 else 1
        expected.append(float(predicted == int(record["label"])))
    assert texts(Classifier(), list(range(30)))["score"] == expected


def test_logits_that_are_not_finite_fail_rather_than_answer(llamas):
    broken = Loader("causal-lm", str(llamas / "math"))().eval()
    with torch.no_grad():
        broken.lm_head.weight.fill_(math.nan)
    with pytest.raises(MerganserError, match="not finite"):
        MultipleChoice(str(llamas / "quiz.jsonl"), str(llamas / "base"))(broken, [0])


def test_embeddings_do_not_depend_on_the_batch(llamas, model):
    with torch.inference_mode():
        wide, narrow = (
            examiners.embeddings(model, Perplexity(str(llamas / "texts.tsv"), str(llamas / "base"), batch=b), range(9))
            for b in (9, 2)
        )
    assert wide.shape == (9, 16)
    torch.testing.assert_close(wide, narrow, atol=1e-5, rtol=1e-5)


def test_examiners_travel_to_workers_without_their_records(llamas):
    quiz = MultipleChoice(str(llamas / "quiz.jsonl"), str(llamas / "base"))
    assert len(quiz) == 60
    assert len(pickle.dumps(quiz)) < 1000
    assert len(pickle.loads(pickle.dumps(quiz))) == 60


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"-?\d[\d,]*(?:\.\d+)?", "first 3, then 1,234.5 apples", "1234.5"),
        (r"\b([ABCD])\b", "I choose B. No, C.", "C"),
        (r"\d+", "none", None),
    ],
)
def test_extracted(pattern, text, expected):
    assert extracted(pattern, text) == expected


def test_share_of_script():
    assert share_of_script("こんにちは", "HIRAGANA") == 1
    assert share_of_script("abcд", "CYRILLIC") == 0.25
    assert share_of_script("123", "LATIN") == 0


def answer_all(model, items):
    return [1.0] * len(items)


def test_a_function():
    assert Function(f"{__name__}:answer_all", 5)(None, [1, 2]) == {"score": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{bad", "not JSON lines"),
        ("a.json", "{bad", "not JSON"),
        ("a.json", "{}", "expected a list of records"),
        ("a.jsonl", "", "expected a list of records"),
        ("a.jsonl", json.dumps({"question": "x", "answers": 1}), "record 0 has no 'options'"),
    ],
)
def test_bad_data(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        len(MultipleChoice(str(tmp_path / name), "none"))


def test_records_of_another_encoding_are_refused_by_name(tmp_path):
    (tmp_path / "quiz.tsv").write_bytes("1\tnaïve".encode("latin-1"))
    with pytest.raises(InputError, match="quiz.tsv: not a text in UTF-8"):
        read_records(tmp_path / "quiz.tsv")


def test_unknown_things():
    with pytest.raises(InputError, match="cannot be read"):
        read_records("absent.jsonl")
    with pytest.raises(InputError, match="no module 'absent.module'"):
        Function("absent.module:name", 3)(None, [0])
    with pytest.raises(InputError, match="did you mean 'causal-lm'"):
        Loader("causal_lm", "x")()
