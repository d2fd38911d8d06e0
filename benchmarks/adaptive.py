"""Input-adaptive merging of eight text experts of MiniLM: accuracy, multiply-adds and bytes against the experts'.

    python -m benchmarks.adaptive --cache ZOO [--samples N] [--quick] [--json FILE]

The experts are those of `benchmarks.zoo.text`, trained if they are missing. Sentences come without their task. Layers,
η, K and the comparison of heads are chosen on validation sentences (the cheapest within one standard error of the
best), results are those of test sentences that no choice has seen. Printed:

- normalised accuracy (accuracy over that of the fine-tuned expert with its own head, mean over tasks) of every baseline
  and router, under three rules for the head: `told` (the true task's head, as the thesis has it for static merges),
  `label` (the answer must be right in its label space; the four polarity tasks share one), `pair` (task and class must
  both be right; SST-2 is made of MR's sentences, and half of SUBJ are reviews of MR's kind, so no router can tell
  these apart);
- batches of 32 sentences that are known to be of one task, which one is not known: how many are routed rightly;
- multiply-adds over those of one forward pass, each step apart, and of sets by their size. Goals: ≤ 2.1 for single
  sentences, ≤ 1.25 for batches of 32 of one task routed on a few probes;
- bytes stored over those of the tensors that training changed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.adaptive_costs import STEPS, baseline_cost, cost_rows, experts_kept, set_rows, size_rows
from benchmarks.adaptive_scores import adaptive, batches_found, joined, same_label, score, shared_heads, show, static
from benchmarks.adaptive_setting import Data, Setting, Sizes, prepare, training_sentences
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text_tasks import TASKS
from merganser.modules.activations import capture
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel
from merganser.routing.baselines import Baseline, Smile, Static, TwinMerging, WeMoE
from merganser.routing.composition import applied
from merganser.routing.layers import leading_layers, sweep_layers
from merganser.routing.routers import MlpRouter, NearestNeighbour, ProjectionRouter, Router, task_accuracy
from merganser.routing.sensitivity import sweep_choice, sweep_redundancy

#: Tasks that differ: one of the polarity tasks' film reviews, no SUBJ, one of the two intent tasks.
DISTINCT = ("mr", "trec", "cr", "mpqa", "clinc150")
SHARES = (0.25, 0.5, 0.75, 1.0)
#: Steps in which WeMoE's gates are adapted to validation sentences; each takes several seconds of one core.
WEMOE_STEPS = 40
PROBED = {"per_batch": True, "probes": 4}
Row = TypeVar("Row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="experts in the library")
    parser.add_argument("--samples", type=int, default=96, help="test sentences of each task")
    parser.add_argument("--quick", action="store_true", help="32 sentences a task; nothing that trains for long")
    parser.add_argument("--json", type=Path, help="store the figures")
    add_locations(parser)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    sizes = Sizes(test=32, tuning=16, support=32) if options.quick else Sizes(test=options.samples)
    setting = prepare(options.cache, options.data, options.tasks, sizes)
    model, report = tune(setting)
    report |= {"samples": sizes.test, "sizes": asdict(sizes), "tasks": options.tasks}
    report |= evaluate(setting, model, report["tuned"], options.quick)
    record(options.json, report, seeds=[0])
    if not options.quick:
        known = training_sentences(options.cache, options.data, options.tasks, 1000)
        report["models"] |= limit_row(setting, model, report["tuned"], known)
        distinct = prepare(options.cache, options.data, DISTINCT, sizes)
        report["distinct"] = distinct_rows(distinct, report["tuned"])
        record(options.json, report, seeds=[0])


def evaluate(setting: Setting, model: AdaptiveModel, tuned: Mapping[str, Any], quick: bool) -> dict[str, Any]:
    print("normalised accuracy, test sentences")
    rows = routed_rows(setting, model, tuned) | baseline_rows(setting, tuned["layer"], quick)
    return {
        "fine_tuned": setting.reference,
        "models": rows,
        "batches": batches_found(setting.data.test, model.with_settings(**PROBED)),
        "wemoe_steps": WEMOE_STEPS,
        "sets": set_rows(setting, model),
        "costs": costs(setting, model, 64 if quick else 256),
        "stored": size_rows(setting, setting.library.path, quick),
    }


def tune(setting: Setting) -> tuple[AdaptiveModel, dict[str, Any]]:
    """Layers, η, K and the comparison of heads, chosen on validation sentences; the accepted experts at every ε."""
    data = setting.data
    print(f"fine-tuned experts: {sum(setting.reference.values()) / len(setting.reference):.1%} on average", flush=True)
    model = setting.model(layer=leading_layers(setting.library, setting.encoder, 1.0), normalize="zscore")
    model.prepare()
    layers = sweep_layers(model, {task: [x for x, _ in parts] for task, parts in data.tuning.items()})
    best = max(layers, key=lambda row: row.accuracy or 0)
    blind = max(layers, key=lambda row: row.margin)
    print(f"best single layer on validation sentences: {best.layer} ({best.accuracy:.1%} of the tasks)")
    print(f"layer chosen without data: {blind.layer} ({blind.accuracy:.1%})", flush=True)
    shares = share_rows(setting, model)
    sentences = sum(len(labels) for parts in data.tuning.values() for _, labels in parts)
    share = cheapest(shares, lambda row: row["task"], lambda row: row["share"], sentences)["share"]
    model = model.with_router(over_first(setting, share))
    choices = sweep_choice(model, data.tuning, (0.1, 0.2, 0.3), (1, 2, 3), ("logit", "posterior"), same_label)
    chosen = cheapest(choices, lambda row: row.accuracy, lambda row: row.set_size, sentences)
    for row in choices:
        print(
            f"  η {row.threshold:.2f}, K {row.top}, {row.score:<10} label {row.accuracy:.1%}, |Ω| {row.set_size:.2f}",
            flush=True,
        )
    settings = {"threshold": chosen.threshold, "top": chosen.top, "score": chosen.score}
    model = model.with_settings(**settings)
    return model, {
        "tuned": {"share": share, "layer": best.layer, "settings": settings},
        "layers": [asdict(row) for row in layers],
        "shares": shares,
        "choices": [asdict(row) for row in choices],
        "threshold_and_top": [asdict(row) for row in choices if row.score == chosen.score],
        "redundancy": redundancy_rows(model, data),
    }


def redundancy_rows(model: AdaptiveModel, data: Data) -> list[dict[str, Any]]:
    """By ε: the experts in the fixed merge, tasks found, and `label`, the accuracy of the labels, on validation
    sentences."""
    rows: list[dict[str, Any]] = []
    known: dict[tuple[str, ...], float] = {}
    own = model.settings
    batches = {task: [x for x, _ in parts] for task, parts in data.tuning.items()}
    for kept in sweep_redundancy(model, batches, (0.02, 0.05, 0.1, 0.3)):
        if kept.accepted not in known:
            other = model.with_accepted(kept.accepted)
            (choice,) = sweep_choice(other, data.tuning, (own.threshold,), (own.top,), correct=same_label)
            known[kept.accepted] = choice.accuracy
        rows.append(asdict(kept) | {"label": known[kept.accepted]})
        print(
            f"  ε {kept.redundancy:.2f}: {len(kept.accepted)} experts, task {kept.accuracy:.1%}, "
            f"label {rows[-1]['label']:.1%}",
            flush=True,
        )
    return rows


def share_rows(setting: Setting, model: AdaptiveModel) -> list[dict[str, float]]:
    """Task accuracy of the router over the first part of the layers, from one pass."""
    seen, truth = [], []
    for task, parts in setting.data.tuning.items():
        for x, labels in parts:
            seen.append(model.first_pass(x).inputs)
            truth += [task] * len(labels)
    rows = []
    for share in SHARES:
        router = over_first(setting, share)
        found = task_accuracy(router.tasks, torch.cat([router.weights(inputs) for inputs in seen]), truth)
        rows.append({"share": share, "layers": len(router.layers), "task": found.first, "task_top3": found.among})
        print(f"  router over the first {share:.0%} of the layers: task {found.first:.1%}", flush=True)
    return rows


def cheapest(rows: Sequence[Row], accuracy: Callable[[Row], float], cost: Callable[[Row], float], count: int) -> Row:
    """The cheapest choice within one standard error, over `count` sentences, of the most accurate one."""
    best = max(map(accuracy, rows))
    enough = best - math.sqrt(best * (1 - best) / count)
    return min((row for row in rows if accuracy(row) >= enough), key=lambda row: (cost(row), -accuracy(row)))


def over_first(setting: Setting, share: float) -> ProjectionRouter:
    layers = leading_layers(setting.library, setting.encoder, share)
    return ProjectionRouter.of(setting.library, layers, "fixed", "zscore")


def routers(model: AdaptiveModel, data: Data, best: str) -> dict[str, Router]:
    """Every router but the tuned one; those that need data are fitted to validation sentences."""
    library, layers = model.library, model.router.layers
    support = seen_at(model, data.support, best)
    return {
        "one layer": ProjectionRouter.of(library, best, "fixed", "zscore"),
        "softmax of residuals": ProjectionRouter.of(library, layers, "fixed", "softmax"),
        "from the base": ProjectionRouter.of(library, layers, "base", "zscore"),
        "nearest neighbour": NearestNeighbour.fit(best, support),
        "MLP": MlpRouter.fit(best, support),
    }


def seen_at(model: AdaptiveModel, sentences: Mapping[str, list[Inputs]], layer: str) -> dict[str, torch.Tensor]:
    return {
        task: torch.cat([model.first_pass(x, [layer]).inputs[layer] for x in parts])
        for task, parts in sentences.items()
    }


def routed_rows(setting: Setting, model: AdaptiveModel, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """MASS as tuned, with separate heads and with one for all polarity tasks; other settings; every other router."""
    rows: dict[str, Any] = {}
    one_head = {"": model, "one polarity head, ": model.with_heads(shared_heads(setting.heads))}
    rows |= scored(setting, "MASS", one_head)
    way = (tuned["settings"]["score"],)
    rows |= scored(setting, "MASS, K = 1", {"": model.with_settings(top=1)}, way)
    rows |= scored(setting, "MASS, K = 3, η = 0.1", {"": model.with_settings(top=3, threshold=0.1)}, ("logit", *way))
    rows |= scored(setting, "MASS, batches, 4 probes", {"": model.with_settings(**PROBED)})
    rows |= scored(setting, "MASS, batches, 4 probes, K = 1", {"": model.with_settings(top=1, **PROBED)}, way)
    for name, router in routers(model, setting.data, tuned["layer"]).items():
        rows |= scored(setting, f"MASS, {name}", {"": model.with_router(router)}, way)
    return rows


def scored(setting: Setting, name: str, models: Mapping[str, AdaptiveModel], ways: Any = None) -> dict[str, Any]:
    found = score(setting.data.test, adaptive(models, *([ways] if ways else [])), setting.reference)
    rows = {f"{name}, {kind}": row for kind, row in found.items()}
    for kind, row in rows.items():
        show(kind, row)
    per_task = next(iter(rows.values()))["per_task"]["label"]
    print("    " + ", ".join(f"{task} {per_task[task] / setting.reference[task]:.0%}" for task in per_task), flush=True)
    return rows


def limit_row(
    setting: Setting, model: AdaptiveModel, tuned: Mapping[str, Any], known: Mapping[str, list[Inputs]]
) -> dict[str, Any]:
    """What sentences tell of their task to a router that was trained on many with the answer."""
    router = MlpRouter.fit(tuned["layer"], seen_at(model, known, tuned["layer"]))
    way = (tuned["settings"]["score"],)
    return scored(setting, "MASS, MLP on 1000 sentences a task", {"": model.with_router(router)}, way)


def distinct_rows(setting: Setting, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """The tuned setting on tasks that differ, with the main baselines."""
    print(f"normalised accuracy among {', '.join(setting.library.experts)}")
    model = setting.model(router=over_first(setting, tuned["share"]), **tuned["settings"])
    model.prepare()
    way = (tuned["settings"]["score"],)
    rows = scored(setting, "MASS", {"": model})
    rows |= scored(setting, "MASS, K = 1", {"": model.with_settings(top=1)}, way)
    rows |= scored(setting, "MASS, batches, 4 probes", {"": model.with_settings(**PROBED)}, way)
    return {
        "fine_tuned": setting.reference,
        "models": rows | baseline_rows(setting, tuned["layer"], quick=True),
        "batches": batches_found(setting.data.test, model.with_settings(**PROBED)),
    }


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
        models["WeMoE"] = setting.baseline(WeMoE).fit(setting.data.support, steps=WEMOE_STEPS)
        models["Twin-Merging"] = setting.baseline(TwinMerging, router=shared_router(shared, setting.data, layer))
    rows: dict[str, Any] = {}
    for name, model in models.items():
        rows[name] = joined(score(setting.data.test, static(model), setting.reference))
        rows[name]["forwards"] = baseline_cost(model, setting)
        show(name, rows[name])
    rows["oracle expert of the library"] = {"told_normalised": experts_kept(setting)}
    show("oracle expert of the library", rows["oracle expert of the library"])
    return rows


def shared_router(shared: Static, data: Data, layer: str) -> MlpRouter:
    """Twin-Merging's router: trained on what its shared expert sees."""
    with applied(shared.module, shared.composition):
        support = {
            task: torch.cat([capture(shared.module, x, [layer]).inputs[layer] for x in parts])
            for task, parts in data.support.items()
        }
    return MlpRouter.fit(layer, support)


def costs(setting: Setting, model: AdaptiveModel, sentences: int) -> dict[str, Any]:
    print("multiply-adds over one forward pass (first pass, router, second pass, switch)")
    rows = {}
    variants = {
        "as tuned": model,
        "K = 1": model.with_settings(top=1),
        "as tuned, routed by three quarters": model.with_router(over_first(setting, 0.75)),
    }
    for name, routed in variants.items():
        rows[name] = cost_rows(setting, routed, sentences)
        for kind, row in rows[name].items():
            parts = ", ".join(f"{row[step]:.2f}" for step in STEPS)
            print(f"  {name}, {kind.replace('_', ', '):<18} {row['ratio']:5.2f}  ({parts})", flush=True)
    return rows


if __name__ == "__main__":
    main()
