"""One model for inputs of unknown task: accuracy of all contenders on the same sentences, multiply-adds and storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import answers
from benchmarks.answers import Answers
from benchmarks.reporting.formats import percent, points, signed
from benchmarks.reporting.parts import Axis, Bars, Figure, Lines, Part, Table, Text

FIXED, BASE, CALIBRATED = "MASS", "MASS, routed from the base", "MASS, calibrated router"
#: What contenders do, in the words of the page.
CONTENDERS = {
    FIXED: "**MASS** routes every sentence by how well its hidden states fit the span of each expert's singular "
    "vectors, read from the fixed merge or from the base, and runs the experts it chose.",
    CALIBRATED: "With a *calibrated router*, a linear discriminant of these residuals replaces their softmax.",
    "SMILE": "**SMILE** mixes experts for every token and layer by their singular vectors.",
    "Arrow": "**Arrow** does so by the first singular vector of each expert alone.",
    "Twin-Merging": "**Twin-Merging** adds low-rank residuals to a shared merge, with a router fitted to validation "
    "sentences.",
    "WeMoE": "**WeMoE** mixes task vectors with gates in the MLP blocks, adapted to unlabelled validation sentences in "
    "a few steps. SMILE's layers and these gates vote for a task.",
    "TSV-M": "TSV-M and task arithmetic are one merge for all inputs.",
}
RULES = """
Every contender has three settings and the same ways to choose a head: that of the task with the largest weight
(*vote*), or the best of all heads by logit, by probability, or by probability and weight (*posterior*, which adds up
tasks with the same labels). Setting and way are chosen on the same validation sentences; routers and gates are fitted
to other ones, whose task is known. One more row is a limit for routers, not a rival: MASS with a router that was fitted
to many more sentences. Half of the sentences of *subj* come from film reviews, as those of *mr* and *sst2* do, but have
other labels.
"""
#: The set, its goal for the best adaptive model, and what it is called.
GOALS = {"8": 0.92, "distinct": 0.97}
TITLES = {"distinct": "tasks that differ"}


def parts(results: Mapping[str, Any]) -> Iterator[Part]:
    sets: Mapping[str, Mapping[str, Any]] = results["sets"]
    shown = {row for found in sets.values() for row in found["rows"]}
    yield Text(" ".join([*(said for row, said in CONTENDERS.items() if row in shown), *RULES.split()]))
    growing = sorted((name for name in sets if name.isdigit()), key=int)
    for name in [*growing, *(name for name in sets if name not in growing)]:
        yield from _set(name, sets[name])
    if len(growing) > 1:
        yield from _growth({int(name): sets[name] for name in growing})
    if "storage" in results:
        yield _storage(results["storage"])


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
        + _gain(read["label"], experts)
        + "".join(
            _unrecognised(rows[row]) for row in limits if limits[row] < GOALS.get(name, 0) and "question" in rows[row]
        )
        + ("" if all("question" in row for row in rows.values()) else " Here, *posterior* does not add up tasks.")
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


def _gain(read: Mapping[str, Answers], experts: Answers) -> str:
    """Say what calibration changes, sentence by sentence."""
    if CALIBRATED not in read or BASE not in read:
        return ""
    gap = answers.difference(read[CALIBRATED], read[BASE], experts)
    return f" Calibration changes MASS, routed from the base, by {points(gap)} points (bold beyond two errors)."


def _unrecognised(row: Mapping[str, Any]) -> str:
    """Say which task the limit mistakes most often for one with other labels, and what that costs at least."""
    shares: Mapping[str, float] = row["question"]
    worst = min(shares, key=lambda task: shares[task])
    others = min(share for task, share in shares.items() if task != worst)
    return (
        f" Even its router finds the label space of only {percent(shares[worst], 0)} % of the sentences of {worst}; of "
        f"the other tasks, of {percent(others, 0)} % or more. The experts themselves, asked as it decides, would keep "
        f"about {percent(sum(shares.values()) / len(shares))} %, and {worst} alone limits every model that does not "
        f"tell its sentences better to {percent(1 - (1 - shares[worst]) / len(shares))} %."
    )


def _growth(sets: Mapping[int, Mapping[str, Any]]) -> Iterator[Part]:
    """What happens to all contenders as the number of tasks grows, and to MASS by the model that its router reads."""
    experts = {count: answers.read({"0": found["experts"]}, found["sentences"]) for count, found in sets.items()}
    labels = {count: _read(found, "label") for count, found in sets.items()}
    rows = [row for row in labels[min(sets)] if all(row in own for own in labels.values())]
    scores = {
        row: {count: answers.difference(labels[count][row], None, experts[count]) for count in sets} for row in rows
    }
    if FIXED in rows and BASE in rows:
        gaps = {count: answers.difference(own[BASE], own[FIXED], experts[count]) for count, own in labels.items()}
        said = ", ".join(f"{points(gap)} points with {count} tasks" for count, gap in gaps.items())
        yield Text(f"{BASE}, keeps more than {FIXED}, routed from the fixed merge, by {said} (bold beyond two errors).")
    columns = ["", *(f"{count} tasks" for count in sets)]
    yield Table(
        columns,
        [[row, *(f"{percent(score.mean)} ± {percent(score.error)}" for score in scores[row].values())] for row in rows],
        "Label right without the task, normalised, %, ± one standard error, as tasks grow",
    )
    yield Figure(
        "adaptive_growth",
        "Normalised accuracy on sentences of unknown task as tasks grow, with one standard error",
        [
            Lines(
                {row: [(count, score.mean) for count, score in scores[row].items()] for row in rows},
                Axis("tasks", whole=True),
                Axis("normalised accuracy, task unknown", percent=True),
                spread={row: [score.error for score in scores[row].values()] for row in rows},
            )
        ],
    )


def _storage(counted: Mapping[str, Mapping[str, float]]) -> Table:
    rows = next(iter(counted.values()))
    return Table(
        ["", *(f"{count} tasks" for count in counted)],
        [[row, *(f"{own[row]:.2f}×" for own in counted.values())] for row in rows],
        "Numbers stored in addition to the base, relative to the trained tensors, counted from their shapes. Factors "
        "have the rank n/T in all methods; the original of WeMoE has whole task vectors. The fixed merge of MASS is "
        "computed from the factors when a model starts, and then takes 1.00× of memory",
    )


def _tasks(found: Mapping[str, Any], read: Mapping[str, Answers], experts: Answers, title: str) -> Table:
    own = answers.accuracies(experts, "0")
    given = {row: answers.accuracies(each, "0") for row, each in read.items()}
    cells = [[task, *(percent(each[task]) for each in given.values()), percent(own[task])] for task in found["tasks"]]
    return Table(["", *given, "fine-tuned experts"], cells, f"Labels right on each task, %, {title}")
