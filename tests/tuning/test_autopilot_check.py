"""The check of the autopilot, simulated: how often it claims a gain that is none, and how often it sees a real one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtri

from merganser.tuning.autopilot import deciding
from merganser.tuning.autopilot.answers import AnswerJournal, Scoreboard
from merganser.tuning.autopilot.budgets import Budget, Meter
from merganser.tuning.autopilot.checking import check
from merganser.tuning.autopilot.contenders import PLAIN, Contender
from merganser.tuning.autopilot.exams import Exam
from merganser.tuning.autopilot.racing import score

TASKS = 3
MODELS = [Contender(name) for name in ("a", "b", "c", "base")]
MERGES = [Contender(f"method{i}", ("a", "b", "c")).at(1.0) for i in range(12)]
PLAIN_MERGE = Contender(PLAIN, ("a", "b", "c")).at(1.0)


class SimulatedMerges:
    """Stands in for merges: a contender is its own variant."""

    def quick(self, contender):
        return contender

    exact = quick


def checked(truth, seed, count=30):
    """Return the check after the best of many contenders were chosen by the questions of the race."""
    draw = np.random.default_rng(seed)
    everyone = [*MODELS, *MERGES, PLAIN_MERGE]
    shared = draw.standard_normal((TASKS, 2 * count))
    own = {each.label: draw.standard_normal(shared.shape) for each in everyone}

    def ask(contender, items):
        """Answer as the simulated contender would; another scale of a merge answers nearly as the merge does."""
        known = contender.at(1.0) if contender.is_merge else contender
        mixed = own[known.label]
        if known != contender:
            fresh = np.random.default_rng([seed, round(1000 * contender.scale)]).standard_normal(shared.shape)
            mixed = math.sqrt(0.9) * mixed + math.sqrt(0.1) * fresh
        right = math.sqrt(0.5) * (shared + mixed) < ndtri([[truth(known, task)] for task in range(TASKS)])
        return {task: right[int(task)][list(chosen)].astype(float) for task, chosen in items.items()}

    exam = Exam({str(task): range(2 * count) for task in range(TASKS)}, ask, "simulated")
    with AnswerJournal(None, exam.name, Meter(Budget())) as kept:
        board = Scoreboard(exam, SimulatedMerges(), kept, lambda *_: None)
        heights = {each.label: score(board.objective, board.ask(each, count)) for each in everyone}
        models = sorted(MODELS, key=lambda each: -heights[each.label])[: deciding.MODELS]
        merges = sorted([*MERGES, PLAIN_MERGE], key=lambda each: -heights[each.label])[: deciding.FINALISTS]
        return check(board, models, merges, PLAIN_MERGE, [], count, count)


def share_of_merges(truth, runs, **options):
    return np.mean([checked(truth, seed, **options).kept.is_merge for seed in range(runs)])


@pytest.mark.parametrize(
    "truth",
    [
        lambda each, task: 0.6,
        lambda each, task: 0.6 if each.is_merge or each.name == "a" else 0.5,
        lambda each, task: 0.6 + ((0.2, -0.1, -0.1)[task] if each.is_merge else 0.0),
        lambda each, task: 0.95,
    ],
    ids=["level", "one model is as good", "better at one task and worse at others", "easy"],
)
@pytest.mark.parametrize("count", [10, 30])
def test_a_merge_that_is_no_better_is_rarely_kept(truth, count):
    assert share_of_merges(truth, 300, count=count) <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 300)


def test_a_merge_that_is_much_better_is_nearly_always_kept():
    assert share_of_merges(lambda each, task: 0.72 if each.is_merge else 0.52, 100) >= 0.9


def test_the_best_of_the_merges_is_chosen_by_all_questions():
    """Chosen by the questions of the race alone, it would be right in about 65 % of cases."""
    truth = lambda each, task: {"method0": 0.75, "method1": 0.7}.get(each.name, 0.2)  # noqa: E731
    assert np.mean([checked(truth, seed).best.name == "method0" for seed in range(100)]) >= 0.75


def test_plain_task_arithmetic_gives_way_only_to_a_surely_better_merge():
    level = lambda each, task: 0.8 if each.is_merge else 0.5  # noqa: E731
    assert np.mean([checked(level, seed).kept.name == PLAIN for seed in range(60)]) >= 0.85
    better = lambda each, task: 0.5 + (0.35 if each.name == "method3" else 0.1 if each.is_merge else 0)  # noqa: E731
    found = [checked(better, seed) for seed in range(60)]
    assert np.mean([each.kept.name == "method3" for each in found]) >= 0.85
    for each in found:
        if each.kept.name == "method3":
            assert each.challenges[-1].against in (PLAIN_MERGE.label, "a", "b", "c", "base")
            assert each.challenges[-1].better


def test_every_merge_is_compared_with_the_model_that_is_the_hardest_to_beat():
    found = checked(lambda each, task: 0.9 if each.is_merge else {"a": 0.7, "b": 0.65}.get(each.name, 0.3), 0)
    assert [each.label for each in found.challenges[: deciding.MODELS]] == ["a", "b"]
    assert all(each.gain is None for each in found.challenges[: deciding.MODELS])
    merges = [each for each in found.challenges[deciding.MODELS :] if each.against != PLAIN_MERGE.label]
    assert len(merges) >= deciding.FINALISTS
    assert {each.against for each in merges} <= {"a", "b"}
    for each in found.challenges:
        assert each.score.value == pytest.approx(np.mean(list(each.by_task.values()))), "a score is the mean over tasks"


def test_the_scale_moves_on_while_all_questions_rate_it_higher():
    """The race saw the wrong scale; the kept one is as good as any of its neighbours."""
    truth = {0.771: 0.3, 0.841: 0.5, 0.917: 0.7, 1.0: 0.8, 1.09: 0.9, 1.19: 0.6}
    at = {scale: Contender("wudi", ("a", "b")).at(scale) for scale in truth}
    single, questions = Contender("a"), 400

    def ask(contender, items):
        share = truth[contender.scale] if contender.is_merge else 0.2
        return {"quiz": [float(item % 100 < 100 * share) for item in items["quiz"]]}

    def kept(budget, plain=None):
        exam = Exam({"quiz": range(questions)}, ask, "scales")
        with AnswerJournal(None, exam.name, Meter(Budget(budget))) as journal:
            board = Scoreboard(exam, SimulatedMerges(), journal, lambda *_: None)
            for each in (single, at[0.841]):
                board.ask(each, 100)
            return check(board, [single], [at[0.841]], plain, [at[0.841]], 100, 200)

    found = kept(None)
    assert found.kept == found.best == at[1.09]
    assert [each.label for each in found.challenges] == [
        single.label, *(at[scale].label for scale in (0.841, 0.771, 0.917, 1.0, 1.09, 1.19))
    ]  # fmt: skip
    assert kept(600).kept == at[0.841]
    assert kept(200 + 400 + 2 * 300).kept == at[0.917]
