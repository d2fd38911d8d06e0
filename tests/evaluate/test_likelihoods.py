from __future__ import annotations

import pickle

import pytest
import torch

from merganser.errors import InputError
from merganser.evaluate import likelihoods
from merganser.evaluate.examiners import MultipleChoice
from merganser.evaluate.generation import ExactMatch, LetterChoice
from merganser.evaluate.likelihoods import score_continuations
from merganser.evaluate.loaders import Loader
from merganser.evaluate.questions import tokenizer_at
from merganser.evaluate.sampling import batches_by_length

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def build(transformers, name):
    torch.manual_seed(3)
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=128)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **SIZES))
    elif name == "bloom":  # no positions, but biases by distance
        model = transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=2)
        )
    elif name in ("mistral", "wide"):  # a window that forgets, and one that has no need to
        window = {"mistral": 8, "wide": 80}[name]
        config = transformers.MistralConfig(vocab_size=60, **SIZES, num_key_value_heads=2, sliding_window=window)
        model = transformers.MistralForCausalLM(config)
    elif name == "t5":
        config = transformers.T5Config(
            vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def plain(model, prompt, rest):
    """One sequence, one token of the continuation at a time."""
    total, greedy = 0.0, True
    for place, token in enumerate(rest):
        if model.config.is_encoder_decoder:
            before = torch.tensor([[0, *rest[:place]]])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=before).logits[0, -1]
        else:
            logits = model(input_ids=torch.tensor([[*prompt, *rest[:place]]])).logits[0, -1]
        total += float(logits.double().log_softmax(-1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


@pytest.fixture
def pairs():
    """Prompts with a common beginning of 20 tokens and without, one of them twice; options of 1 to 5 tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(3, 60, (count,), generator=generator).tolist()

    stem = draw(20)
    shared = [(prompt, draw(size)) for length in (3, 1, 7) for prompt in [[*stem, *draw(length)]] for size in (1, 3, 5)]
    return shared, [*shared, (draw(4), draw(2)), (shared[0][0], draw(4))]


@pytest.mark.parametrize(
    ("name", "shares"),
    [("llama", True), ("gpt2", True), ("bloom", True), ("mistral", None), ("wide", True), ("t5", None)],
)
def test_shared_prompts_give_what_one_token_at_a_time_gives(transformers, pairs, name, shares):
    model = build(transformers, name)
    with torch.inference_mode():
        for some in pairs:
            for batch in (1, 4, 16):
                found = score_continuations(model, some, batch)
                for (prompt, rest), each in zip(some, found, strict=True):
                    log, greedy = plain(model, prompt, rest)
                    assert each.log == pytest.approx(log, abs=2e-4)
                    assert each.greedy == greedy
    assert likelihoods._SHARING.get(model) is shares
    assert score_continuations(model, []) == []


def test_each_prompt_is_read_once(transformers, pairs):
    model, seen, headed = build(transformers, "llama"), [], []
    with torch.inference_mode():
        score_continuations(model, pairs[0])  # finds out whether the model can share
        model.register_forward_pre_hook(lambda m, a, k: seen.append(tuple(k["input_ids"].shape)), with_kwargs=True)
        model.lm_head.register_forward_hook(lambda m, a, out: headed.append(tuple(out.shape[:2])))
        score_continuations(model, pairs[0])
    # the common beginning, the rest of three prompts, and their six longer options but for the last token
    assert seen == [(1, 20), (3, 7), (6, 4)]
    # and the head sees only the last token of each prompt
    assert headed == [(1, 1), (3, 1), (6, 4)]


def test_a_model_that_answers_otherwise_with_its_cache_is_asked_whole(transformers, pairs):
    model = build(transformers, "llama")
    original = model.forward

    def forgetful(input_ids=None, attention_mask=None, past_key_values=None, position_ids=None, **options):
        return original(input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **options)

    def wrong(input_ids=None, attention_mask=None, past_key_values=None, **options):
        output = original(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values, **options
        )
        output.logits = output.logits * (1 if past_key_values is None else 2)
        return output

    expected = [plain(model, *pair)[0] for pair in pairs[1]]
    for forward in (forgetful, wrong):
        model.forward = forward
        likelihoods._SHARING.pop(model, None)
        with torch.inference_mode():
            assert [x.log for x in score_continuations(model, pairs[1])] == pytest.approx(expected, abs=2e-4)
    assert likelihoods._SHARING[model] is False


def test_examples_stand_before_every_question(llamas):
    base = str(llamas / "base")
    model = Loader("causal-lm", str(llamas / "math"))().eval()
    examples = [{"question": f"w{i}", "options": ["w7", "w8"], "answer": i % 2} for i in range(4)]
    asked = [{"question": "w11 w12", "options": ["w1", "w2", "w3"], "answer": 2}]
    quiz = MultipleChoice(asked, base, shots=2, examples=examples)
    text = quiz.ask(quiz.records[0])
    shown = text.split("\n\n")
    assert len(shown) == 3
    assert shown[2] == "Question: w11 w12\nAnswer:"
    assert {line.split()[-1] for line in shown[:2]} == {"w7", "w8"}, "stratified: one of each answer"
    tokenizer = tokenizer_at(base)
    start = tokenizer(text)["input_ids"]
    logs = [plain(model, start, tokenizer(option)["input_ids"])[0] for option in asked[0]["options"]]
    with torch.inference_mode():
        found = quiz(model, [0])
    assert found["score"] == [float(logs.index(max(logs)) == 2)]
    assert found["soft"] == pytest.approx([float(torch.tensor(logs).softmax(0)[2])], abs=1e-4)
    letters = LetterChoice(asked, base, shots=1, examples=examples)
    assert letters.ask(letters.records[0]).split("\n\n")[0].endswith(("Answer: A", "Answer: B"))


def test_examples_that_are_missing_or_asked_are_refused(llamas):
    asked = [{"question": "w1", "answer": "w2"}]
    for options, message in (
        ({"shots": 2}, "give their file"),
        ({"shots": 2, "examples": [{"question": "w3", "answer": "w4"}]}, "2 examples are needed, but .* has only 1"),
        ({"shots": 1, "examples": asked}, "one of them is record 0 of the questions"),
    ):
        with pytest.raises(InputError, match=message):
            len(ExactMatch(asked, str(llamas / "base"), **options))


def test_a_chat_template_has_turns_and_its_own_marks(llamas, tmp_path):
    import shutil

    folder = tmp_path / "chat"
    shutil.copytree(llamas / "base", folder)
    examples, asked = [{"question": "w1", "answer": "w2"}], [{"question": "w3", "answer": "w4"}]
    without = ExactMatch(asked, str(llamas / "base"), chat=True)
    with pytest.raises(InputError, match="no chat template"):
        without.ask(without.records[0])
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = ExactMatch(asked, str(folder), shots=1, examples=examples, chat=True, prompt="{question}")
    assert chat.ask(chat.records[0]) == "<user>w1<assistant>w2<user>w3<assistant>"


def test_questions_are_tokenized_once_for_all_models(llamas, monkeypatch):
    quiz = MultipleChoice(str(llamas / "quiz.jsonl"), str(llamas / "base"))
    made = []
    original = MultipleChoice._tokenize_options

    def counted(self, model, item, record):
        made.append(item)
        return original(self, model, item, record)

    monkeypatch.setattr(MultipleChoice, "_tokenize_options", counted)
    with torch.inference_mode():
        for name in ("math", "code"):
            quiz(Loader("causal-lm", str(llamas / name))().eval(), [0, 1, 3])
    assert made == [0, 1, 3]
    assert "_tokenized" not in pickle.loads(pickle.dumps(quiz)).__dict__


def test_few_short_sequences_share_a_batch_and_many_do_not():
    assert [sorted(each) for each in batches_by_length([10, 20, 30, 40], 16)] == [[0, 1, 2, 3]]
    for lengths in ([10] * 9 + [40] * 9, [300, 200, 100]):
        for chosen in batches_by_length(lengths, 16):
            longest = max(lengths[n] for n in chosen)
            padding = [longest - lengths[n] for n in chosen]
            assert sum(padding) <= 64 or max(padding) <= max(8, longest // 4)
    assert len(list(batches_by_length([300, 200, 100], 16))) == 3
