from __future__ import annotations

import pytest
import torch

from merganser.errors import InputError
from merganser.evaluate.examiners import MultipleChoice
from merganser.evaluate.temperatures import fit_temperature


class Known(MultipleChoice):
    """Log-likelihoods that are known, of answers drawn from softmax(ℓ/3)."""

    def option_logs(self, model, items):
        return [model[item] for item in items]


@pytest.fixture
def quiz():
    generator = torch.Generator().manual_seed(0)
    logs = 6 * torch.randn(4000, 4, generator=generator, dtype=torch.float64)
    drawn = torch.multinomial(torch.softmax(logs / 3, 1), 1, generator=generator)[:, 0].tolist()
    records = [{"question": str(i), "options": ["a", "b", "c", "d"], "answer": a} for i, a in enumerate(drawn)]
    return Known(records, ""), logs


def test_the_temperature_that_drew_the_answers_is_found(quiz):
    examiner, logs = quiz
    assert fit_temperature(examiner, [logs], range(4000)) == pytest.approx(3, rel=0.06)
    assert fit_temperature(examiner, [logs / 6, logs / 6], range(4000)) == pytest.approx(0.5, rel=0.06)


def test_knowing_nothing_is_the_highest_temperature_and_no_items_are_refused(quiz):
    examiner, logs = quiz
    assert fit_temperature(examiner, [-logs], range(4000)) == pytest.approx(50, rel=0.01)
    with pytest.raises(InputError, match="at least one model and one item"):
        fit_temperature(examiner, [logs], [])


def test_a_model_is_asked_as_the_examiner_asks(llamas):
    from merganser.evaluate.loaders import Loader

    quiz = MultipleChoice(str(llamas / "quiz.jsonl"), str(llamas / "base"))
    model = Loader("causal-lm", str(llamas / "math"))().eval()
    with torch.inference_mode():
        sure = [int(each.argmax()) for each in quiz.option_logs(model, range(len(quiz)))]
    knowing = MultipleChoice([r | {"answer": a} for r, a in zip(quiz.records, sure, strict=True)], str(llamas / "base"))
    assert fit_temperature(knowing, [model], range(len(quiz))) == pytest.approx(0.05, rel=0.01), "always right"
