"""One model for inputs of unknown task: accuracy of all contenders on the same sentences, multiply-adds and storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import answers
from benchmarks.answers import Answers
from benchmarks.reporting.formats import percent, signed
from benchmarks.reporting.parts import Axis, Bars, Figure, Part, Table, Text

NAMES = """
**MASS** routes every sentence by how well its hidden states fit the span of each expert's singular vectors, read from
the fixed merge or from the base, and runs the experts it chose. **SMILE** mixes experts for every token and layer by
their singular vectors. **Twin-Merging** adds low-rank residuals to a shared merge, with a router trained on validation
sentences. **WeMoE** mixes task vectors with gates in the MLP blocks, adapted to unlabelled validation sentences in a
few steps; its gates vote for a task, as SMILE's layers do. TSV-M and task arithmetic are one merge for all inputs.
Every contender has three settings and the same ways to choose a head: the head of the task with the largest weight
(*vote*), or the best of all heads by logit, by probability, or by probability and weight (*posterior*). Setting and
way are chosen on the same validation sentences. One more row is a limit for routers, not a rival: MASS whose router was
trained on up to 1,000 labelled sentences of every task.
"""
#: The set, its goal for the best adaptive model, and what it is called.
GOALS = {"8": 0.92, "distinct": 0.97}
TITLES = {"distinct": "tasks that differ"}


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(NAMES)
    for name, found in results["sets"].items():
        yield from _set(name, found)


def _read(found: Mapping[str, Any], kind: str) -> dict[str, Answers]:
    return {name: answers.read({"0": row[kind]}, found["sentences"]) for name, row in found["rows"].items()}


def _set(name: str, found: Mapping[str, Any]) -> Iterator[Part]:
    counts, rows = found["sentences"], found["rows"]
    experts = answers.read({"0": found["experts"]}, counts)
    read = {kind: _read(found, kind) for kind in ("label", "pair", "told")}
    scores = {
        kind: {row: answers.difference(own, None, experts) for row, own in rows_of.items()}
        for kind, rows_of in read.items()
    }
    rivals = {row: read["label"][row] for row, stored in rows.items() if not stored.get("limit")}
    below = answers.leaders(rivals, experts)
    best = max(rivals, key=lambda row: scores["label"][row].mean)
    limits = {row: scores["label"][row].mean for row in rows if row not in rivals}
    title = TITLES.get(name, f"{name} tasks")
    own = sum(answers.accuracies(experts, "0").values()) / len(counts)
    tuning = found.get("sizes", {}).get("tuning")
    yield Text(
        f"{title[0].upper()}{title[1:]} ({', '.join(found['tasks'])}): {sum(counts.values())} test sentences without "
        f"their task. The experts themselves reach {percent(own)} % on average"
        + (f"; settings are chosen on {tuning} validation sentences of each task" if tuning else "")
        + f". {_goal(name, best, scores['label'][best].mean)} {_losses(read['label'][best], experts)}"
        + "".join(f" The limit ({row}) is {percent(reached)} %." for row, reached in limits.items())
    )
    cells = []
    for row, stored in rows.items():
        label = f"{percent(scores['label'][row].mean)} ± {percent(scores['label'][row].error)}"
        cells.append(
            [
                row,
                f"{stored['setting']}, {stored['rule']}",
                percent(scores["told"][row].mean),
                f"**{label}**" if row in rivals and (below[row].mean == 0 or not below[row].clear) else label,
                percent(scores["pair"][row].mean),
                percent(stored.get("task")),
                f"{stored['forwards']:.2f}",
                f"{stored['numbers']:.2f}×",
            ]
        )
    columns = ["", "setting, heads", "true head", "label right", "task and label right", "task found"]
    columns += ["forwards", "stored"]
    caption = (
        f"{title[0].upper()}{title[1:]}. Normalised accuracy, %, ± one standard error: with the head of the true task; "
        "label right (polarity tasks share their labels); task and label right. Bold as for static merges. Forwards: "
        "multiply-adds for single sentences relative to a forward pass of the encoder, merging included; the frozen "
        "half, which is the same for all tasks, runs once. Stored: numbers in addition to the base, relative to the "
        "trained tensors"
    )
    yield Table(columns, cells, caption)
    names = sorted(rows, key=lambda row: scores["label"][row].mean)
    rules = {"label right": "label", "task and label right": "pair"}
    bars = Bars(
        names,
        {label: [scores[kind][row].mean for row in names] for label, kind in rules.items()},
        Axis("normalised accuracy, task unknown", percent=True),
        errors={label: [scores[kind][row].error for row in names] for label, kind in rules.items()},
        dots=True,
    )
    yield Figure(
        f"adaptive_{name}",
        f"Normalised accuracy on sentences of unknown task, {title}, with one standard error",
        [bars],
    )
    yield _tasks(found, read["label"], experts, title)


def _goal(name: str, best: str, reached: float) -> str:
    goal = GOALS.get(name)
    text = f"The best, {best}, keeps {percent(reached)} % of the labels."
    if goal is None:
        return text
    return (
        f"{text} Goal ({percent(goal, 0)} % of the labels with {TITLES.get(name, f'all {name} tasks')}): "
        f"{'met' if reached >= goal else 'not met'} ({percent(reached)} %)."
    )


def _losses(best: Answers, experts: Answers) -> str:
    """The tasks on which the best model loses most against the experts."""
    own, kept = answers.accuracies(experts, "0"), answers.accuracies(best, "0")
    most = sorted(own, key=lambda task: own[task] - kept[task], reverse=True)[:3]
    named = ", ".join(f"{task} ({signed(100 * (kept[task] - own[task]), 0)} points)" for task in most)
    return f"It loses most on {named}."


def _tasks(found: Mapping[str, Any], read: Mapping[str, Answers], experts: Answers, title: str) -> Table:
    own = answers.accuracies(experts, "0")
    given = {row: answers.accuracies(each, "0") for row, each in read.items()}
    cells = [[task, *(percent(each[task]) for each in given.values()), percent(own[task])] for task in found["tasks"]]
    return Table(["", *given, "fine-tuned experts"], cells, f"Labels right on each task, %, {title}")
