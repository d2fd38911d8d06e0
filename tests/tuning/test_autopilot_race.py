"""The race of the autopilot: its rule against a naive one, simulated contenders whose truth is known, budgets."""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.errors import InputError, MerganserError
from merganser.evolve.objectives import Objective
from merganser.tuning.autopilot import answers as answering
from merganser.tuning.autopilot.answers import AnswerJournal, Scoreboard
from merganser.tuning.autopilot.budgets import Budget, Meter
from merganser.tuning.autopilot.contenders import METHODS, Contender, propose
from merganser.tuning.autopilot.deciding import decide
from merganser.tuning.autopilot.exams import Exam
from merganser.tuning.autopilot.racing import fit_to_budget, reject, rung_ends, worst_case

EXPERTS = ("a", "b", "c")
MODELS = [Contender(name) for name in (*EXPERTS, "base")]


class SimulatedMerges:
    """Stands in for merges: a contender is its own variant."""

    seed = 0

    def quick(self, contender):
        return contender

    exact = quick

    def document(self, contender):
        return {"method": contender.name, **contender.parameters}


def simulated_exam(truth, count=300, tasks=2, seed=0, correlation=0.5):
    """Questions of several tasks that `contender` answers rightly with probability `truth(contender)`.

    Half of what decides an answer is the question's own, the same for all contenders.
    """
    generator = np.random.default_rng(seed)
    shared = {f"t{t}": generator.standard_normal(count) for t in range(tasks)}

    def ask(contender, items):
        found = {}
        for task, chosen in items.items():
            own = np.random.default_rng([seed, zlib.crc32(contender.label.encode()), int(task[1:])])
            noise = own.standard_normal(count)
            score = math.sqrt(correlation) * shared[task] + math.sqrt(1 - correlation) * noise
            found[task] = (score < NormalDist().inv_cdf(truth(contender)))[list(chosen)].astype(float)
        return found

    orders = {task: list(generator.permutation(count)) for task in shared}
    return Exam(orders, ask, "simulated")


def decided(exam, budget=None, journal=None, questions=200, on_answer=lambda *_: None, merges=None):
    with AnswerJournal(journal, exam.name, Meter(Budget.parse(budget))) as kept:
        board = Scoreboard(exam, SimulatedMerges(), kept, on_answer)
        return decide(board, MODELS, merges or propose(EXPERTS, ()), (), questions)


def naive_rule(means, wins, losses, count):
    """Agresti and Min by hand for one task of right and wrong answers, and the worse half."""
    order = sorted(means, key=lambda label: -means[label])
    leader = order[0]
    stay = []
    for place, label in enumerate(order):
        won, lost, n = wins[label] + 0.5, losses[label] + 0.5, count + 2
        difference = (won - lost) / n
        high = difference + 1.959963984540054 * math.sqrt(((won + lost) / n - difference**2) / n)
        if label == leader or (max(high, means[label] - means[leader]) >= 0 and place < math.ceil(len(order) / 2)):
            stay.append(label)
    return stay


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(2, 40), st.integers(0, 10**6))
def test_the_rule_is_the_naive_one(contenders, count, seed):
    generator = np.random.default_rng(seed)
    rates = generator.random(contenders)
    answers = {f"c{i}": {"t": (generator.random(count) < rate).astype(float)} for i, rate in enumerate(rates)}
    means = {label: sum(own["t"]) / count for label, own in answers.items()}
    leader = sorted(means, key=lambda label: -means[label])[0]
    pairs = {label: list(zip(own["t"], answers[leader]["t"], strict=True)) for label, own in answers.items()}
    wins = {label: sum(x > y for x, y in own) for label, own in pairs.items()}
    losses = {label: sum(x < y for x, y in own) for label, own in pairs.items()}
    stay, why = reject(Objective.of("t"), answers)
    assert stay == naive_rule(means, wins, losses, count)
    assert set(stay) | set(why) == set(answers)
    assert not set(stay) & set(why)


def test_answers_that_are_not_numbers_never_lead():
    stay, why = reject(Objective.of("t"), {"bad": {"t": np.array([np.nan, 1.0])}, "good": {"t": np.array([0.0, 0.0])}})
    assert stay == ["good"]
    assert "not numbers" in why["bad"]


def test_rungs_double_and_their_cost_is_bounded():
    assert rung_ends(18, 200, 8) == (13, 26, 52, 104, 200)
    assert rung_ends(3, 60, 1) == (48, 60)
    assert rung_ends(18, 10, 1) == (10,)
    assert worst_case(4, (5, 10, 20), lambda a, b: b - a) == 4 * 5 + 2 * 5
    assert fit_to_budget(lambda n: 7 * n, 100, 350, "x") == 50
    assert fit_to_budget(lambda n: 7 * n, 100, None, "x") == 100
    with pytest.raises(InputError, match="a budget of 6 questions is too small for 2 merges: it needs at least 7"):
        fit_to_budget(lambda n: 7 * n, 100, 6, "2 merges")


def peaked(contender):
    """Methods have different heights, and a scale that is right for them."""
    if not contender.is_merge:
        return 0.5
    heights = {"task_arithmetic": 0.62, "ties": 0.63, "tsv": 0.72, "iso_c": 0.74, "iso_cts": 0.76, "wudi": 0.66}
    peak = {"task_arithmetic": 0.4, "iso_c": 1.6, "iso_cts": 1.5}.get(contender.name, 0.8)
    return heights.get(contender.name, 0.6) - 0.1 * math.log2(contender.scale / peak) ** 2


def drawn_truth(seed):
    """Heights and peaks of the methods drawn at random."""
    generator = np.random.default_rng([seed, 7])
    heights = {name: 0.55 + 0.25 * generator.random() for name in METHODS}
    peaks = {name: 2 ** generator.uniform(-1.5, 1.5) for name in METHODS}

    def truth(contender):
        if not contender.is_merge:
            return 0.5
        return heights[contender.name] - 0.06 * math.log2(contender.scale / peaks[contender.name]) ** 2

    return truth, max(heights.values())


def test_the_winner_is_within_one_standard_error_of_the_best():
    behind = []
    for seed in range(50):
        truth, best = drawn_truth(seed)
        error = math.sqrt(best * (1 - best) / 400)  # of the 200 questions of two tasks
        winner = _parsed(decided(simulated_exam(truth, seed=seed)).best)
        behind.append((best - truth(winner)) / error)
    assert np.mean(np.array(behind) <= 1) >= 0.85, behind
    assert np.mean(behind) <= 0.6


def _parsed(label):
    name, scale = label.split(" scale=")
    return Contender(name, EXPERTS).at(float(scale))


@pytest.mark.parametrize("behind", [0.0, 0.05])
def test_it_says_no_when_nothing_is_better(behind):
    truth = lambda contender: 0.7 - (behind if contender.is_merge or contender.name != "a" else 0)  # noqa: E731
    found = [decided(simulated_exam(truth, seed=seed)) for seed in range(60)]
    assert np.mean([decision.verdict == "do not merge" for decision in found]) >= 0.9
    if behind:
        assert np.mean([decision.kept == "a" for decision in found]) >= 0.85


def test_plain_task_arithmetic_is_kept_unless_something_is_surely_better():
    truth = lambda contender: 0.8 if contender.is_merge else 0.5  # noqa: E731
    found = [decided(simulated_exam(truth, seed=seed)) for seed in range(20)]
    assert all(decision.verdict == "merge" for decision in found)
    assert np.mean([decision.kept.startswith("task_arithmetic") for decision in found]) >= 0.9


@settings(max_examples=25, deadline=None)
@given(st.integers(400, 6000), st.integers(0, 100))
def test_a_budget_of_questions_is_kept(budget, seed):
    try:
        decision = decided(simulated_exam(peaked, seed=seed, count=120), budget)
    except InputError as error:
        assert "too small" in str(error)
        return
    assert decision.asked <= budget
    assert decision.challenges
    assert not decision.stopped


@pytest.mark.parametrize("seconds", [5, 60, 200, 700, 5000])
def test_a_budget_of_time_is_kept(seconds, monkeypatch):
    """A clock that moves by a second a question."""
    now = [0.0]
    exam = simulated_exam(peaked, count=120)

    def ask(contender, items):
        now[0] += sum(map(len, items.values()))
        return exam.asker(contender, items)

    monkeypatch.setattr(answering.time, "perf_counter", lambda: now[0])
    decision = decided(Exam(exam.orders, ask, "timed"), f"{seconds}s")
    assert decision.seconds <= seconds
    assert decision.stopped == (seconds < 5000)
    assert bool(decision.challenges) == (seconds > 5)
    if not decision.challenges:
        assert decision.verdict == "do not merge"
        assert "budget ended" in decision.text


@pytest.mark.parametrize("seconds", [20, 90, 150, 300, 450])
@pytest.mark.parametrize("slower", [1, 3])
def test_a_budget_of_time_ends_in_a_decision_if_methods_are_slow(seconds, slower, monkeypatch):
    """Methods run for 20 seconds, in the check for `slower` times as long, and a hundred questions take one."""
    now = [0.0]
    exam = simulated_exam(peaked, count=120)

    def ask(contender, items):
        now[0] += 0.01 * sum(map(len, items.values()))
        return exam.asker(contender, items)

    def run(_merges, contender, seconds):
        now[0] += seconds * contender.is_merge
        return contender

    monkeypatch.setattr(answering.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(SimulatedMerges, "quick", lambda self, each: run(self, each, 20.0))
    monkeypatch.setattr(SimulatedMerges, "exact", lambda self, each: run(self, each, 20.0 * slower))
    decision = decided(Exam(exam.orders, ask, "timed"), f"{seconds}s")
    assert decision.seconds <= seconds + 20.0 * slower  # a run that is longer than all before
    assert decision.verdict in ("merge", "do not merge")


def test_limits_are_read_as_they_are_written():
    assert Budget.parse("5000, 10m") == Budget(5000, 600.0)
    for bad, message in (
        ("0", "give more than 0"),
        ("5,6", "two numbers"),
        ("soon", "is not a time"),
        ("", "is not a time"),
    ):
        with pytest.raises(InputError, match=message):
            Budget.parse(bad)


def test_a_killed_race_goes_on_with_the_same_result(tmp_path):
    whole = decided(simulated_exam(peaked))
    journal, calls = tmp_path / "answers.jsonl", []

    def until(limit):
        exam = simulated_exam(peaked)

        def ask(contender, items):
            if len(calls) == limit:
                raise KeyboardInterrupt
            calls.append((contender.label, {task: tuple(chosen) for task, chosen in items.items()}))
            return exam.asker(contender, items)

        return Exam(exam.orders, ask, exam.name)

    for limit in (3, 20, 45):
        with pytest.raises(KeyboardInterrupt):
            decided(until(limit), journal=journal)
        with journal.open("a") as file:
            file.write('{"label": "cut o')
    resumed = decided(until(None), journal=journal)
    kept = {name: value for name, value in resumed.to_dict().items() if name != "seconds"}
    assert kept == {name: value for name, value in whole.to_dict().items() if name != "seconds"}
    assert sum(len(i) for _, items in calls for i in items.values()) == whole.asked, "nothing is asked twice"
    again = decided(until(0), journal=journal)
    assert again.kept == whole.kept
    assert again.asked == whole.asked
    with pytest.raises(InputError, match="the answers of another race"):
        decided(Exam(simulated_exam(peaked).orders, None, "another"), journal=journal)
    journal.write_text('{"label": "x", "scored_by": "simulated"}\n')
    with pytest.raises(InputError, match="line 1: not an answer of a race"):
        decided(until(0), journal=journal)


def test_a_larger_budget_goes_on_from_the_answers_of_a_smaller(tmp_path):
    journal, asked = tmp_path / "answers.jsonl", []
    small = decided(simulated_exam(peaked), 1500, journal)
    large = decided(simulated_exam(peaked), 6000, journal, on_answer=lambda label, count, total: asked.append(count))
    assert large.asked == small.asked + sum(asked) <= 6000
    assert small.asked <= 1500


def test_a_merge_that_breaks_loses_and_is_explained(tmp_path):
    """Methods fail on some models, and large scales overflow: that is no reason to stop."""
    exam, journal = simulated_exam(peaked), tmp_path / "answers.jsonl"

    def ask(contender, items, broken=("iso_cts", "iso_c")):
        if contender.name in broken:
            raise MerganserError("the merged model's logits are not finite")
        return exam.asker(contender, items)

    for _ in range(2):  # the second time from the journal
        decision = decided(Exam(exam.orders, ask, "broken"), journal=journal)
        assert decision.best.startswith("tsv")
        assert decision.rejected["iso_c scale=1"] == "the merged model's logits are not finite"
    with pytest.raises(MerganserError, match="no merge could be asked: the merged model's logits"):
        decided(Exam(exam.orders, lambda c, items: ask(c, items, METHODS), "all"))
    with pytest.raises(MerganserError, match="logits are not finite"):
        decided(Exam(exam.orders, lambda c, items: ask(c, items, ("a",)), "a model"))


def test_too_few_questions_are_refused():
    with pytest.raises(InputError, match="task 'quiz': 8 questions are too few"):
        Exam({"quiz": range(8)}, lambda *_: {}, "x")


def test_wrong_answers_of_an_asker_are_refused():
    exam = Exam({"quiz": range(30)}, lambda variant, items: {"quiz": [1.0]}, "x")
    with pytest.raises(InputError, match="task 'quiz': 1 answers to 15 items"):
        decided(exam)
