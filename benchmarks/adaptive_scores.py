"""How answers of `benchmarks.adaptive` are scored: rules for the head, normalised accuracy, and a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel, Prediction
from merganser.routing.baselines import Baseline
from merganser.routing.choices import task_accuracy
from merganser.routing.heads import HeadScore
from merganser.routing.sensitivity import accuracy, same_pair

POLARITY = frozenset({"mr", "sst2", "cr", "mpqa"})
SCORES: tuple[HeadScore, ...] = ("logit", "probability", "posterior")
TOLD = "told"
#: From sentences and their task to answers under several names; `TOLD` is the one with the true task's head.
Answers = Callable[[Inputs, str], Mapping[str, Prediction]]
Head = Mapping[str, Tensor]
Labelled = Sequence[tuple[Inputs, Tensor]]


def same_label(task: str, label: int, true_task: str, true_label: int) -> bool:
    """Polarity tasks have the same two classes: the answer of one counts for the others."""
    shared = task == true_task or (task in POLARITY and true_task in POLARITY)
    return shared and label == true_label


def shared_heads(heads: Mapping[str, Head]) -> dict[str, Head]:
    """One head for all polarity tasks, the mean of theirs; no data are needed."""
    polarity = [heads[task] for task in heads if task in POLARITY]
    mean = {part: torch.stack([head[part] for head in polarity]).mean(0) for part in ("weight", "bias")}
    return {task: mean if task in POLARITY else head for task, head in heads.items()}


def score(data: Mapping[str, Labelled], answers: Answers, reference: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """For every name of answers: accuracy and normalised accuracy, `pair` and `label`, or `told`; which sentences have
    the right label (`right`, a digit for each); the size of the sets; and how often the true task has the largest
    weight, or one of the three largest."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    weights: dict[str, list[Tensor]] = {}
    sizes: dict[str, list[int]] = {}
    marks: dict[str, dict[str, str]] = {}
    truth = [task for task, parts in data.items() for _, labels in parts for _ in labels]
    for task, parts in data.items():
        total = sum(len(labels) for _, labels in parts)
        for x, labels in parts:
            for name, prediction in answers(x, task).items():
                sizes.setdefault(name, []).extend(len(chosen) for chosen in prediction.sets)
                weights.setdefault(name, []).append(prediction.weights)
                marked = marks.setdefault(name, {})
                marked[task] = marked.get(task, "") + digits(prediction, task, labels)
                rules = {TOLD: same_pair} if name == TOLD else {"pair": same_pair, "label": same_label}
                for rule, correct in rules.items():
                    per_task = found.setdefault(name, {}).setdefault(rule, {})
                    right = len(labels) * accuracy(prediction, task, labels, correct)
                    per_task[task] = per_task.get(task, 0.0) + right / total
    rows = {}
    for name, by_rule in found.items():
        rows[name] = _row(by_rule, reference) | {"set_size": _mean(sizes[name])}
        seen = torch.cat(weights[name])
        if name == TOLD:
            continue
        rows[name]["right"] = marks[name]
        if bool((seen != seen[:1]).any()):
            tasks = task_accuracy(tuple(data), seen, truth)
            rows[name] |= {"task": tasks.first, "task_top3": tasks.among, "task_per_task": dict(tasks.per_task)}
    return rows


def digits(prediction: Prediction, task: str, labels: Tensor) -> str:
    """1 for every sentence with the right label, 0 for the others."""
    answers = zip(prediction.tasks, prediction.classes.tolist(), labels.tolist(), strict=True)
    return "".join(str(int(same_label(found, label, task, true))) for found, label, true in answers)


def batches_found(data: Mapping[str, Labelled], model: AdaptiveModel) -> dict[str, dict[str, int]]:
    """Batches of each task, and how many of them got their own task's expert with the largest weight."""
    found = {}
    for task, parts in data.items():
        best = [model.tasks[int(model.route(x).weights[0].argmax())] for x, _ in parts]
        found[task] = {"batches": len(parts), "right": best.count(task), "sentences": sum(len(y) for _, y in parts)}
    return found


def _row(rules: Mapping[str, Mapping[str, float]], reference: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {"per_task": {rule: dict(values) for rule, values in rules.items()}}
    for rule, values in rules.items():
        row[rule] = _mean(values.values())
        row[f"{rule}_normalised"] = _mean(values[task] / reference[task] for task in values)
    return row


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def adaptive(models: Mapping[str, AdaptiveModel], scores: tuple[HeadScore, ...] = SCORES) -> Answers:
    """One routed pass by the first model, answered with the heads of each of them and compared in several ways."""
    first = next(iter(models.values()))

    def answers(x: Inputs, task: str) -> dict[str, Prediction]:
        routed = first(x)
        return {
            f"{name}heads by {way}": model.answer(x, routed, score=way)
            for name, model in models.items()
            for way in scores
        }

    return answers


def static(model: Baseline) -> Answers:
    """One pass; the head by vote (or by the best logit where there are no gates), and told."""

    def answers(x: Inputs, task: str) -> dict[str, Prediction]:
        output, votes = model.run(x)
        return {"free": model.answer(x, output, votes), TOLD: model.answer(x, output, votes, task)}

    return answers


def joined(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The rows of `static` as one."""
    free, told = rows["free"], rows[TOLD]
    return {**told, **free, "per_task": {**free["per_task"], **told["per_task"]}}


def show(name: str, row: Mapping[str, Any]) -> None:
    told = f"{row['told_normalised']:7.1%}" if "told_normalised" in row else "      –"
    extra = f"   task {row['task']:.1%}, in the first 3 {row['task_top3']:.1%}" if "task" in row else ""
    cost = f"   {row['forwards']:.2f} forwards" if "forwards" in row else ""
    free = "".join(
        f"{rule} {row[f'{rule}_normalised']:6.1%}   " for rule in ("label", "pair") if f"{rule}_normalised" in row
    )
    print(f"  {name:<52} told {told}   {free}{extra}{cost}", flush=True)
