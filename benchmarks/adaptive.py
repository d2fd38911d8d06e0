"""Input-adaptive merging of eight text experts of MiniLM: accuracy, multiply-adds and bytes against the experts'.

    python -m benchmarks.adaptive --cache ZOO [--samples N] [--quick] [--json FILE]

The experts are those of `benchmarks.zoo.text`, trained if they are missing. Sentences come without their task. Printed:

- normalised accuracy (accuracy over that of the fine-tuned expert with its own head, mean over tasks) of every baseline
  and router, under three rules for the head: `told` (the true task's head, as the thesis has it for static merges),
  `label` (the answer must be right in its label space; the four polarity tasks share one), `pair` (task and class must
  both be right; SST-2 is made of MR's sentences, and half of SUBJ are reviews of MR's kind, so no router can tell
  these apart);
- multiply-adds over those of one forward pass, with and without the work of switching sets. Goals: ≤ 2.1 for single
  sentences, ≤ 1.25 for batches of 32 of one task routed on a few probes;
- bytes stored over those of the tensors that training changed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.adaptive_setting import Data, Setting, prepare
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text import expert_directory
from benchmarks.zoo.text_tasks import TASKS
from merganser.experts import AdaptiveModel, Library
from merganser.experts.accounting import Cost, measure, multiply_adds, stored
from merganser.experts.activations import capture
from merganser.experts.baselines import Baseline, Oracle, Smile, Static, TwinMerging, WeMoE
from merganser.experts.composition import applied
from merganser.experts.heads import Heads, Prediction
from merganser.experts.inputs import Inputs
from merganser.experts.layers import leading_layers, sweep_layers
from merganser.experts.routing import MlpRouter, NearestNeighbour, ProjectionRouter, Router, task_accuracy
from merganser.experts.sensitivity import accuracy, sweep_choice, sweep_redundancy

POLARITY = frozenset({"mr", "sst2", "cr", "mpqa"})
#: From sentences and their task to the answers without it, and those with the task's head where that can be told.
Answers = Callable[[Inputs, str], tuple[Prediction, Prediction | None]]


def same_label(task: str, label: int, true_task: str, true_label: int) -> bool:
    """Polarity tasks have the same two classes: the answer of one counts for the others."""
    shared = task == true_task or (task in POLARITY and true_task in POLARITY)
    return shared and label == true_label


def score(data: Data, answers: Answers, reference: Mapping[str, float]) -> dict[str, Any]:
    """Accuracy and normalised accuracy under each rule that applies: `told` only where a model can be told the task."""
    found: dict[str, dict[str, float]] = {"pair": {}, "label": {}, "told": {}}
    sizes = []
    for task, parts in data.test.items():
        total = sum(len(labels) for _, labels in parts)
        right = dict.fromkeys(found, 0.0)
        for x, labels in parts:
            free, told = answers(x, task)
            sizes += [len(chosen) for chosen in free.sets]
            right["pair"] += len(labels) * accuracy(free, task, labels)
            right["label"] += len(labels) * accuracy(free, task, labels, same_label)
            right["told"] += len(labels) * accuracy(told, task, labels) if told else math.nan
        for rule in found:
            found[rule][task] = right[rule] / total
    found = {rule: values for rule, values in found.items() if not math.isnan(sum(values.values()))}
    result: dict[str, Any] = {"per_task": found, "set_size": sum(sizes) / len(sizes)}
    for rule, values in found.items():
        result[rule] = sum(values.values()) / len(values)
        result[f"{rule}_normalised"] = sum(values[t] / reference[t] for t in values) / len(values)
    return result


def adaptive(model: AdaptiveModel) -> Answers:
    return lambda x, task: (model.predict(x), None)


def static(model: Baseline) -> Answers:
    """One pass for both rules."""

    def answers(x: Inputs, task: str) -> tuple[Prediction, Prediction]:
        output, votes = model.run(x)
        return model.answer(x, output, votes), model.answer(x, output, votes, task)

    return answers


def routers(model: AdaptiveModel, data: Data, layers: list[str], best: str) -> dict[str, Router]:
    """Every router; those that need data are fitted to validation sentences at the layer the sweep found best."""
    library = model.library
    support = {
        task: torch.cat([model.first_pass(x, [best]).inputs[best] for x in parts])
        for task, parts in data.support.items()
    }
    return {
        "projection, one layer": ProjectionRouter.of(library, best, "fixed", "zscore"),
        "projection, several layers": ProjectionRouter.of(library, layers, "fixed", "zscore"),
        "projection, several, softmax": ProjectionRouter.of(library, layers, "fixed", "softmax"),
        "projection from the base": ProjectionRouter.of(library, layers, "base", "zscore"),
        "nearest neighbour": NearestNeighbour.fit(best, support),
        "MLP": MlpRouter.fit(best, support),
    }


def shared_router(shared: Static, data: Data, layer: str) -> MlpRouter:
    """Twin-Merging's router: trained on what its shared expert sees."""
    with applied(shared.module, shared.composition):
        support = {
            task: torch.cat([capture(shared.module, x, [layer]).inputs[layer] for x in parts])
            for task, parts in data.support.items()
        }
    return MlpRouter.fit(layer, support)


def router_accuracy(model: AdaptiveModel, data: Data) -> dict[str, float]:
    weights, truth = [], []
    for task, parts in data.test.items():
        for x, labels in parts:
            weights.append(model.router.weights(model.first_pass(x).inputs))
            truth += [task] * len(labels)
    found = task_accuracy(model.router.tasks, torch.cat(weights), truth)
    return {"task": found.first, "task_top3": found.among, **{f"task_{k}": v for k, v in found.per_task.items()}}


def costs(model: AdaptiveModel, data: Data, sentences: int) -> dict[str, Any]:
    """Single sentences in a mixed order, with a cache that is empty at first, and again when all test sentences have
    been answered; then whole batches of one task routed on probes."""
    singles = [
        part.select(torch.tensor([index]))
        for index in range(sentences)
        for parts in data.test.values()
        for part, _ in parts[:1]
        if index < part.size
    ]
    singles = [trimmed(x) for x in singles]
    first = sum((measure(model, x) for x in singles), Cost(0, 0, 0, 0, 0))
    for parts in data.test.values():
        for x, _ in parts:
            model.forward(x)
    warm = sum((measure(model, x) for x in singles), Cost(0, 0, 0, 0, 0))
    whole = model.with_settings(per_batch=True, probes=4)
    per_batch = sum(
        (measure(whole, part) for parts in data.test.values() for part, _ in parts[:1]), Cost(0, 0, 0, 0, 0)
    )
    return {name: shares(cost) for name, cost in (("single_cold", first), ("single_warm", warm), ("batch", per_batch))}


def trimmed(x: Inputs) -> Inputs:
    """A single sentence without its padding."""
    assert x.mask is not None
    length = int(x.mask.sum())
    return Inputs((), {key: value[:, :length] for key, value in x.kwargs.items()})


def shares(cost: Cost) -> dict[str, float]:
    steps = ("first_pass", "router", "second_pass", "switch")
    return {step: getattr(cost, step) / cost.forward for step in steps} | {"ratio": cost.ratio}


def baseline_costs(baseline: Baseline, data: Data) -> float:
    """Multiply-adds of a baseline's own pass over those of a forward pass."""
    spent = plain = 0
    for parts in data.test.values():
        x = parts[0][0]
        spent += multiply_adds(lambda x=x: baseline.run(x))[1]  # type: ignore[misc]
        plain += multiply_adds(lambda x=x: x.run(baseline.module))[1]  # type: ignore[misc]
    return spent / plain


def show(name: str, row: Mapping[str, Any]) -> None:
    told = f"{row['told_normalised']:7.1%}" if "told_normalised" in row else "      –"
    extra = f"   task {row['task']:.1%}, in the first 3 {row['task_top3']:.1%}" if "task" in row else ""
    cost = f"   {row['forwards']:.2f} forwards" if "forwards" in row else ""
    free = f"label {row['label_normalised']:6.1%}   pair {row['pair_normalised']:6.1%}"
    print(f"  {name:<44} told {told}   {free}{extra}{cost}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="experts in the library")
    parser.add_argument("--samples", type=int, default=300, help="test sentences of each task")
    parser.add_argument(
        "--support", type=int, default=100, help="validation sentences of each task, for routers with data"
    )
    parser.add_argument("--quick", action="store_true", help="32 sentences a task; no baselines that train, no sweeps")
    parser.add_argument("--json", type=Path, help="store the figures")
    add_locations(parser)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    samples = 32 if options.quick else options.samples
    setting = prepare(options.cache, options.data, options.tasks, samples, 32 if options.quick else options.support)
    report = evaluate(setting, options.quick)
    report |= {"machine": describe(), "samples": samples, "tasks": options.tasks}
    record(options.json, report)


def evaluate(setting: Setting, quick: bool) -> dict[str, Any]:
    print(f"fine-tuned experts: {np.mean(list(setting.reference.values())):.1%} on average", flush=True)
    layers = leading_layers(setting.library, setting.encoder)
    model = setting.model(layer=layers, normalise="zscore")
    report: dict[str, Any] = {"fine_tuned": setting.reference, "accepted": model.accepted}
    scores = sweep_layers(model, setting.data.support)
    report["layers"] = [asdict(row) for row in scores]
    best = max(scores, key=lambda row: row.accuracy or 0)
    by_margin = max(scores, key=lambda row: row.margin)
    print(f"best single layer on validation sentences: {best.layer} ({best.accuracy:.1%} of the tasks)")
    print(f"layer chosen without data: {by_margin.layer} ({by_margin.accuracy:.1%})", flush=True)
    print("normalised accuracy")
    report["models"] = routed_rows(setting, model, layers, best.layer) | baseline_rows(setting, best.layer, quick)
    report["costs"] = cost_rows(setting, model, 2 if quick else 4)
    report["stored"] = size_rows(setting, setting.library.path, quick)
    return report if quick else report | sensitivity(setting, model)


def routed_rows(setting: Setting, model: AdaptiveModel, layers: list[str], best: str) -> dict[str, Any]:
    """MASS with every router, then its settings with the projection over several layers."""
    rows = {}
    for name, router in routers(model, setting.data, layers, best).items():
        routed = model.with_router(router)
        row = score(setting.data, adaptive(routed), setting.reference) | router_accuracy(routed, setting.data)
        rows[f"MASS, {name}"] = row
        show(f"MASS, {name}", row)
        per_task = row["per_task"]["label"]
        found = ", ".join(f"{task} {per_task[task] / setting.reference[task]:.0%}" for task in per_task)
        print(f"    {found}", flush=True)
    variants: dict[str, dict[str, Any]] = {
        "top 1": {"top": 1},
        "heads by probability": {"score": "probability"},
        "heads by posterior": {"score": "posterior"},
        "batches, 4 probes": {"per_batch": True, "probes": 4},
        "batches, 4 probes, top 1": {"per_batch": True, "probes": 4, "top": 1},
    }
    for name, settings in variants.items():
        row = score(setting.data, adaptive(model.with_settings(**settings)), setting.reference)
        rows[f"MASS, several layers, {name}"] = row
        show(f"MASS, several layers, {name}", row)
    return rows


def baseline_rows(setting: Setting, layer: str, quick: bool) -> dict[str, Any]:
    models: dict[str, Baseline] = {
        "the base": setting.baseline(Static, method="task_arithmetic", scale=0.0),
        "task arithmetic, 0.3": setting.baseline(Static, method="task_arithmetic"),
        "TSV-Merge": setting.baseline(Static),
        "SMILE, top 1": setting.baseline(Smile, top=1),
    }
    if not quick:
        shared = models["task arithmetic, 0.3"]
        assert isinstance(shared, Static)
        models["SMILE, top 2"] = setting.baseline(Smile, top=2)
        models["WeMoE"] = setting.baseline(WeMoE).fit(setting.data.support, steps=6)
        models["Twin-Merging"] = setting.baseline(TwinMerging, router=shared_router(shared, setting.data, layer))
    rows: dict[str, Any] = {}
    for name, model in models.items():
        rows[name] = score(setting.data, static(model), setting.reference)
        rows[name]["forwards"] = baseline_costs(model, setting.data)
        show(name, rows[name])
    rows["oracle expert of the library"] = {"told_normalised": (kept := experts_kept(setting))}
    print(f"  {'oracle expert of the library':<44} told {kept:7.1%}", flush=True)
    return rows


def experts_kept(setting: Setting) -> float:
    """Normalised accuracy of the library's experts, each told its task: what compression leaves of them."""
    oracle = setting.baseline(Oracle)
    found = []
    for task, parts in setting.data.test.items():
        right = [len(labels) * accuracy(oracle.predict(x, task), task, labels) for x, labels in parts]
        found.append(sum(right) / sum(len(labels) for _, labels in parts) / setting.reference[task])
    return float(np.mean(found))


def size_rows(setting: Setting, directory: Path, quick: bool) -> dict[str, Any]:
    """Bytes of the library with factors in several dtypes, and what is left of the experts at that size."""
    rows = {}
    for dtype in ("float32",) if quick else ("float32", "bfloat16", "int8"):
        library = setting.library
        if dtype != "float32":
            path = directory.with_name(f"{directory.name}-{dtype}")
            experts = {task: expert_directory(directory.parents[1], task) for task in library.experts}
            base = directory.parents[1] / "text" / "base"
            library = Library(path) if path.exists() else Library.build(base, experts, path, dtype=dtype)
        size = stored(library, Heads(setting.heads, library.experts).parameters())
        kept = experts_kept(replace(setting, library=library))
        rows[dtype] = asdict(size) | {"relative": size.relative, "relative_to_trained": size.relative_to_trained}
        rows[dtype]["told_normalised"] = kept
        print(
            f"stored, {dtype}: {size.relative:.2f}× the numbers of the base; {size.relative_to_trained:.2f}× the bytes "
            f"of the trained tensors; experts at {kept:.1%}",
            flush=True,
        )
    return rows


def cost_rows(setting: Setting, model: AdaptiveModel, sentences: int) -> dict[str, Any]:
    print("multiply-adds over one forward pass (first pass, router, second pass, switch)")
    rows = {}
    variants: dict[str, dict[str, Any]] = {"top 3": {}, "top 1": {"top": 1}}
    for name, settings in variants.items():
        fresh = setting.model(router=model.router).with_settings(**settings)
        rows[name] = costs(fresh, setting.data, sentences)
        for kind, row in rows[name].items():
            parts = ", ".join(f"{row[step]:.2f}" for step in ("first_pass", "router", "second_pass", "switch"))
            print(f"  {name}, {kind:<12} {row['ratio']:5.2f}  ({parts})", flush=True)
    return rows


def sensitivity(setting: Setting, model: AdaptiveModel) -> dict[str, Any]:
    choices = sweep_choice(model, setting.data.test, (0.1, 0.2, 0.3), (1, 3), same_label)
    for row in choices:
        print(f"  η {row.threshold:.2f}, K {row.top}: label {row.accuracy:.1%}, |Ω| {row.set_size:.2f}", flush=True)
    filters = sweep_redundancy(model, setting.data.test, (0.02, 0.05, 0.1, 0.3))
    for kept in filters:
        print(f"  ε {kept.redundancy:.2f}: {len(kept.accepted)} experts, task {kept.accuracy:.1%}", flush=True)
    return {"threshold_and_top": [asdict(row) for row in choices], "redundancy": [asdict(row) for row in filters]}


if __name__ == "__main__":
    main()
