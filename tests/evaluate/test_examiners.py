from __future__ import annotations

import copy
import json
import math
import pickle
import sys
import types

import pytest
import torch

from merganser.errors import InputError, MerganserError
from merganser.evaluate import examiners, questions
from merganser.evaluate.examiners import KINDS, Classification, Function, MultipleChoice, Perplexity
from merganser.evaluate.generation import ExactMatch, Generation, LetterChoice, find_last_match, share_of_script
from merganser.evaluate.loaders import Loader
from merganser.evaluate.prompts import fill
from merganser.evaluate.records import read_records


def records_of(path):
    return [placed.record for placed in read_records(path)]


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
    tokenizer = questions.tokenizer_at(str(llamas / "base"))
    records = records_of(llamas / "quiz.jsonl")
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
    tokenizer = questions.tokenizer_at(str(llamas / "base"))
    records = [r | {"context": "w1 w2 w3 w4 w5 " * 40} for r in records_of(llamas / "quiz.jsonl")[:8]]
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
    assert sorted(asked) == sorted(tokenizer(prompt)["input_ids"][-60:] for prompt in prompts)


def test_what_does_not_fit_a_sequence_is_refused(llamas, model):
    records = records_of(llamas / "quiz.jsonl")[:2]
    records[1]["options"] = ["w1", "w2 " * 70]
    quiz = MultipleChoice(records, str(llamas / "base"))
    with torch.inference_mode():
        assert len(quiz(model, [0])["score"]) == 1
        with pytest.raises(InputError, match=r"record 1: an option has 70 tokens .* the 64 of a sequence"):
            quiz(model, [0, 1])
        with pytest.raises(InputError, match="leaves no room for a prompt in 64 tokens"):
            Generation(str(llamas / "sums.jsonl"), str(llamas / "base"), max_new_tokens=64)(model, [0])
    assert MultipleChoice(records, str(llamas / "base"), max_length=9).limit(model) == 9
    assert quiz.limit(torch.nn.Linear(1, 1)) == questions.LONGEST


def test_perplexity_is_the_mean_over_tokens(llamas, model):
    texts = Perplexity(str(llamas / "texts.tsv"), str(llamas / "base"), batch=3)
    tokenizer = questions.tokenizer_at(str(llamas / "base"))
    records = records_of(llamas / "texts.tsv")
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
    tokenizer = questions.tokenizer_at(str(llamas / "base"))
    records = records_of(llamas / "texts.tsv")
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
    assert find_last_match(pattern, text) == expected


def test_share_of_script():
    assert share_of_script("こんにちは", "HIRAGANA") == 1
    assert share_of_script("abcд", "CYRILLIC") == 0.25
    assert share_of_script("123", "LATIN") == 0


def answer_all(model, items):
    return [1.0] * len(items)


def test_a_function():
    assert Function(f"{__name__}:answer_all", 5)(None, [1, 2]) == {"score": [1.0, 1.0]}


def count_tokens(model, items, tokenizer):
    return {"score": [float(len(tokenizer("w1 w2")["input_ids"]))] * len(items)}


def test_a_function_gets_the_tokenizer_if_it_asks_for_it(llamas):
    reference = f"{__name__}:count_tokens"
    assert Function(reference, 5, str(llamas / "base"))(None, [1]) == {"score": [2.0]}
    with pytest.raises(InputError, match="needs a tokenizer, but none is known"):
        Function(reference, 5)(None, [1])


def test_the_dtype_of_a_loaded_model_may_be_chosen(llamas):
    for dtype in ("float32", "bfloat16"):
        model = Loader("causal-lm", str(llamas / "math"), dtype=dtype)()
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_encoder_decoders_write_and_choose(llamas, transformers):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=1, eos_token_id=2
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    base = str(llamas / "base")
    with torch.inference_mode():
        reply = model.generate(**questions.tokenizer_at(base)("w1", return_tensors="pt"), max_new_tokens=3)[0, 1:]
        text = str(questions.tokenizer_at(base).decode(reply, skip_special_tokens=True))
        asked = [{"question": "w1", "answer": text or "none"}, {"question": "w1", "answer": "other"}]
        found = ExactMatch(asked, base, prompt="{question}", max_new_tokens=3)(model, [0, 1])
        assert found["score"] == [float(bool(text)), 0.0]
        quiz = MultipleChoice(str(llamas / "quiz.jsonl"), base)(model, range(4))
    assert len(quiz["score"]) == 4


GOOD = json.dumps({"question": "x", "options": ["y", "z"], "answer": 1})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{bad", "a.jsonl, line 1: not JSON"),
        ("a.jsonl", GOOD + "\n\n{bad", "a.jsonl, line 3: not JSON"),
        ("a.json", "{bad", "a.json: not JSON"),
        ("a.json", "{}", "expected a list of records"),
        ("a.jsonl", "", "contains no questions"),
        ("a.jsonl", "[1]", "line 1: expected a record"),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("a.jsonl", json.dumps({"question": "x", "answers": 1}), "line 1: no 'options'"),
        ("a.jsonl", GOOD + "\n" + GOOD.replace(": 1", ": 2"), "line 2: 'answer' must be a whole number from 0 below 2"),
        ("a.jsonl", GOOD.replace(": 1", ": null"), "line 1: no 'answer'"),
        ("a.jsonl", GOOD.replace(": 1", ': "b"'), "line 1: 'answer' must be a whole number"),
        ("a.jsonl", GOOD.replace('["y", "z"]', "5"), "line 1: 'options' must be a list of two texts or more"),
        ("a.tsv", "question\toptions\tanswer\nq\t[1\t0", "line 2: 'options' is not a JSON list"),
        ("a.tsv", "question\toptions\tanswer\nq\t[1]\t0\tx", "line 2: 4 columns instead of 3"),
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


class Parrot(torch.nn.Module):
    """Replies with given texts, whatever it is asked."""

    def __init__(self, tokenizer, replies):
        super().__init__()
        self.weight, self.tokenizer, self.replies = torch.nn.Parameter(torch.zeros(1)), tokenizer, list(replies)

    def generate(self, input_ids, max_new_tokens, pad_token_id, **options):
        tokens = [self.tokenizer(self.replies.pop(0))["input_ids"] for _ in input_ids]
        width = max(map(len, tokens))
        rows = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in tokens])
        return torch.cat([input_ids, rows], 1)


@pytest.fixture
def letters(monkeypatch):
    """A tokenizer of characters, so that any reply can be given."""

    class Characters:
        pad_token_id, model_max_length = 0, 4096
        padding_side = truncation_side = "right"

        def __call__(self, texts, **options):
            if isinstance(texts, str):
                return {"input_ids": [ord(c) for c in texts]}
            rows = [[ord(c) for c in text] for text in texts]
            width = max(map(len, rows))
            batch = Batch(input_ids=torch.tensor([[0] * (width - len(r)) + r for r in rows]))
            batch["attention_mask"] = (batch["input_ids"] > 0).long()
            return batch

        def decode(self, ids, **options):
            return "".join(chr(i) for i in ids if i)

    class Batch(dict):
        def to(self, device):
            return self

    tokenizer = Characters()
    for module in ("questions", "generation", "prompts"):
        monkeypatch.setattr(f"merganser.evaluate.{module}.tokenizer_at", lambda path: tokenizer)
    return tokenizer


def test_a_model_that_writes_the_next_question_is_not_scored_on_it(letters):
    asked = [{"question": "3 * 6?", "answer": "18"}, {"question": "2 + 2?", "answer": "#### 4"}]
    replies = ["$18.00\nQuestion: 2 + 2?\nAnswer: 4", "18\n\nQuestion: 2 + 2?\nAnswer: 4"]
    assert Generation(asked, "none")(Parrot(letters, replies), [0, 1])["score"] == [1, 0]
    assert Generation(asked, "none", stop=())(Parrot(letters, replies), [0, 1])["score"] == [0, 1]


def test_a_pattern_compares_letter_by_letter(letters):
    asked = [{"question": "3 * 6?", "answer": "18"}] * 2
    assert Generation(asked, "none", pattern=r"\d+")(Parrot(letters, ["18", "18.0"]), [0, 1])["score"] == [1, 0]


def test_choices_are_read_from_what_is_written(letters):
    asked = [
        {"question": "Capital of France?", "options": ["Rome", "Paris"], "answer": answer}
        for answer in ("B", 1, "Paris", "A")
    ]
    choice = LetterChoice(asked, "none")
    assert choice.records[0]["choices"] == "A. Rome\nB. Paris\n"
    replies = ["(B) because (A) is wrong", "b", "It is Paris.", "Answer: B."]
    assert choice(Parrot(letters, replies), range(4))["score"] == [1, 1, 1, 0]


def test_exact_match_is_a_kind_like_the_others(letters):
    asked = [{"question": "?", "answer": "forty two"}] * 2
    assert KINDS["exact-match"] is ExactMatch
    assert ExactMatch(asked, "none")(Parrot(letters, ["\n forty two \nmore", "Forty two"]), [0, 1])["score"] == [1, 0]


def test_generation_stops_at_a_stop_string(llamas, model):
    """Each reply of a batch on its own: what it would have written further does not count as its length."""
    plain = Generation(str(llamas / "sums.jsonl"), str(llamas / "base"), max_new_tokens=8, stop=())
    with torch.inference_mode():
        lengths = plain(model, range(6))["length"]
        batch = plain.encode([fill(plain.prompt, plain.records[0])], model, pad="left", cut="left", reserved=8)
        reply = model.generate(**batch, max_new_tokens=8, do_sample=False)[0, batch["input_ids"].shape[1] :]
        tokenizer = questions.tokenizer_at(str(llamas / "base"))
        word = str(tokenizer.decode(reply[2:3])).strip()
        stopped = Generation(str(llamas / "sums.jsonl"), str(llamas / "base"), max_new_tokens=8, stop=(word,))
        found = stopped(model, range(6))["length"]
    assert word
    assert found[0] <= 3 < lengths[0]
    assert all(a <= b for a, b in zip(found, lengths, strict=True))


def test_fields_may_have_other_names(tmp_path):
    (tmp_path / "sums.tsv").write_text("problem\tsolution\n1 + 1?\t2\n")
    sums = Generation(str(tmp_path / "sums.tsv"), "none", fields={"question": "problem", "answer": "solution"})
    assert sums.records[0]["question"] == "1 + 1?"
    assert sums.records[0]["answer"] == "2"
    with pytest.raises(InputError, match=r"no 'qestion' to rename; did you mean 'question'\?"):
        len(Generation(str(tmp_path / "sums.tsv"), "none", fields={"qestion": "problem"}))


def test_tables_hold_every_kind_of_question(tmp_path):
    (tmp_path / "quiz.tsv").write_text('Which?\t["a", "b"]\t1\n')
    assert MultipleChoice(str(tmp_path / "quiz.tsv"), "none").records[0]["options"] == ["a", "b"]
    (tmp_path / "line.jsonl").write_text('\ufeff{"question": "a\u2028b", "answer": "5"}\n', encoding="utf-8")
    assert len(Generation(str(tmp_path / "line.jsonl"), "none")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "{qestion}"}, "line 1: the prompt asks for the field 'qestion'.*did you mean 'question'"),
        ({"prompt": "{question"}, "prompt .* cannot be filled in"),
        ({"prompt": "{}"}, "line 1: the prompt asks for the field"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "[a-z]+"}, "line 1: the pattern .* finds nothing in the answer '18'"),
    ],
)
def test_what_every_question_would_fail_by_is_said_on_reading(tmp_path, options, message):
    (tmp_path / "sums.jsonl").write_text('{"question": "3 * 6?", "answer": "18"}\n')
    with pytest.raises(InputError, match=message):
        len(Generation(str(tmp_path / "sums.jsonl"), "none", **options))


def test_answers_without_a_number_are_refused(tmp_path):
    (tmp_path / "capitals.jsonl").write_text('{"question": "?", "answer": "Paris"}\n')
    with pytest.raises(InputError, match="line 1: the answer 'Paris' contains no number; use kind exact-match"):
        len(Generation(str(tmp_path / "capitals.jsonl"), "none"))
    with pytest.raises(InputError, match="line 1: 'answer' must be a letter"):
        len(LetterChoice(str(tmp_path / "capitals.jsonl"), "none"))


def test_labels_beyond_the_models_classes_are_a_fault_of_the_file(llamas, model):
    texts = Classification([{"text": "w1", "label": 10_000}], str(llamas / "base"))
    with pytest.raises(InputError, match="record 0: the label 10000 is not one of the model's"):
        texts(classifier(model), [0])
    with pytest.raises(InputError, match="LlamaForCausalLM: kind classification asks a sequence classifier"):
        texts(model, [0])


def test_replies_of_a_model_without_numbers_are_an_error(llamas, model):
    spoilt = copy.deepcopy(model)
    torch.nn.init.constant_(spoilt.model.layers[0].mlp.down_proj.weight, math.nan)
    sums = Generation(str(llamas / "sums.jsonl"), str(llamas / "base"), max_new_tokens=8)
    with pytest.raises(MerganserError, match="logits are not finite"):
        sums(spoilt, [0, 1])


def classifier(model):
    """Return a module with two logits for each text."""
    module = torch.nn.Linear(1, 1)
    module.forward = lambda **batch: types.SimpleNamespace(logits=model(**batch).logits[:, -1, :2])
    return module


def test_a_reply_must_be_right_and_in_the_language(letters, monkeypatch):
    words = {"die": "de", "the": "en"}
    fake = types.SimpleNamespace(classify=lambda text: (words.get(text.split()[0].lower(), "xx"), -1.0))
    monkeypatch.setitem(sys.modules, "py3langid", fake)
    asked = [{"question": "3 * 6?", "answer": "18"}] * 4
    replies = ["Die Antwort ist 18.", "The answer is 18.", "Die Antwort ist 17.", "18"]
    german = Generation(asked, "none", language="de")
    found = german(Parrot(letters, replies), range(4))
    assert found["score"] == [1, 0, 0, 0]
    assert found["correct"] == [1, 1, 0, 1]
    assert found["language"] == [1, 0, 1, 0], "a reply without words is in no language"
    assert set(found) == {"score", *german.measures}
    assert german.directions == {"score": "higher", "correct": "higher", "language": "higher"}
    for options, message in (
        ({"language": "German"}, "not a code such as en"),
        ({"language": "de", "script": "LATIN"}, "give one of them"),
    ):
        with pytest.raises(InputError, match=message):
            len(Generation(asked, "none", **options))


def test_an_identifier_that_is_not_installed_is_said_on_reading(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(InputError, match=r"merganser\[language\]"):
        len(Generation([{"question": "?", "answer": "1"}], "none", language="de"))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("La respuesta es 18 euros.", "es"),
        ("Die Antwort lautet $\\boxed{18}$.", "de"),
        ("答えは18です。", "ja"),
        ("Janet sells 9 eggs and makes <<9*2=18>>18 dollars.", "en"),
    ],
)
def test_languages_are_told_apart(text, code):
    pytest.importorskip("py3langid")
    from merganser.evaluate.answers.languages import is_in_language

    assert [c for c in ("de", "en", "es", "ja") if is_in_language(text, c)] == [code]


@pytest.mark.parametrize("text", [None, "{"])
def test_a_model_whose_tokenizer_cannot_be_loaded(tmp_path, text):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="the questions need its tokenizer, which cannot be loaded"):
        questions.tokenizer_at(str(tmp_path))
