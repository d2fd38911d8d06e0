"""Input-adaptive merging of text experts of MiniLM: accuracy, multiply-adds and bytes, all contenders asked alike.

    python -m benchmarks.adaptive [--cache ZOO] [--sets 8 distinct 14 20] [--only NAME] [--quick] [--json FILE]

The experts are those of `benchmarks.zoo.text`, trained if they are missing. Sentences come without their task. Every
contender (`benchmarks.adaptive_contenders`) has three settings and the same ways to compare heads; both are chosen on
the same validation sentences by the share of right labels. Routers and gates that are fitted see the same other
validation sentences. Scores are of at least 2,000 test sentences that no choice has seen. One more row tells the limit:
a router fitted to ten times as many sentences of known task. All numbers of sentences are shared among the tasks, so
that more tasks take no more time. What FILE holds of the same experts stays and is not measured again.

Stored in `results`, by set of tasks: `tasks`, `sentences` (test sentences of each), `experts` (bits of the fine-tuned
experts' right answers, see `benchmarks.answers`), and `rows` by contender:

- `setting` and `rule` that were chosen, and `tuning`: the share of right labels by setting and rule;
- `limit`: whether it knows what the others do not;
- `question`: by task, the share of sentences answered with a class of the right label space;
- `label`, `pair`, `told`: bits of the right answers by task. A label is right in its label space (the four polarity
  tasks share one), a pair if the task is right as well; told is the answer of the true task's head, for what ran;
- `task`: how often the true task has the largest weight; `set_size`: experts merged for a sentence;
- `forwards`: multiply-adds over those of one forward pass of the whole encoder, merging of sets included, for single
  sentences in a stream of all tasks; `numbers`: what is stored beside the base, over the trained tensors' numbers.

`storage` has the same numbers for every contender, counted from the shapes, by number of tasks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import answers
from benchmarks.adaptive_contenders import CONTENDERS, Contender, Model, Pass, marks, run
from benchmarks.adaptive_costs import forwards, numbers, storage
from benchmarks.adaptive_setting import Setting, Sizes, prepare, same_question
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text_tasks import TASK_SETS
from merganser.routing import Prediction

#: Tasks that differ: one of the polarity tasks' film reviews, no SUBJ, one of the two intent tasks.
DISTINCT = ("mr", "trec", "cr", "mpqa", "clinc150")
SETS: Mapping[str, tuple[str, ...]] = {"distinct": DISTINCT, **{str(n): names for n, names in TASK_SETS.items()}}


def tune(contender: Contender, setting: Setting) -> tuple[Model, str, str, dict[str, dict[str, float]]]:
    """The model, setting and rule with the most right labels on validation sentences, and all their shares."""
    shares: dict[str, dict[str, float]] = {}
    models = {}
    for name, build in contender.settings.items():
        models[name] = build(setting)
        found: dict[str, list[float]] = {}
        for task, parts in setting.data.tuning.items():
            for rule, predictions in run(setting, models[name], parts, task).answers.items():
                found.setdefault(rule, []).append(float(marks(predictions, parts, task, "label").float().mean()))
        shares[name] = {rule: sum(each) / len(each) for rule, each in found.items()}
    ranked = {(name, rule): share for name, rules in shares.items() for rule, share in rules.items()}
    name, rule = max(ranked, key=lambda key: ranked[key])
    return models[name], name, rule, shares


def measure(contender: Contender, setting: Setting) -> dict[str, Any]:
    """The row of a contender on the test sentences."""
    model, name, rule, shares = tune(contender, setting)
    passes = {task: run(setting, model, parts, task) for task, parts in setting.data.test.items()}
    row: dict[str, Any] = {"setting": name, "rule": rule, "tuning": shares, "limit": contender.limit}
    for kind in ("label", "pair"):
        row[kind] = _packed(setting, {task: each.answers[rule] for task, each in passes.items()}, kind)
    row["told"] = _packed(setting, {task: each.told for task, each in passes.items()}, "pair")
    row["question"] = {task: _asked(each.answers[rule], task) for task, each in passes.items()}
    row |= _routing(passes) | {"forwards": forwards(model, setting), "numbers": numbers(model, setting)}
    return row


def _packed(setting: Setting, predictions: Mapping[str, Any], kind: Any) -> dict[str, str]:
    return {
        task: answers.pack(marks(found, setting.data.test[task], task, kind).numpy())
        for task, found in predictions.items()
    }


def _asked(predictions: Sequence[Prediction], task: str) -> float:
    found = [same_question(own, task) for prediction in predictions for own in prediction.tasks]
    return sum(found) / len(found)


def _routing(passes: Mapping[str, Pass]) -> dict[str, float]:
    """How often the true task has the largest weight, and how many experts a set has; nothing for static merges."""
    if "vote" not in next(iter(passes.values())).answers:
        return {}
    right = total = size = 0
    for task, found in passes.items():
        for prediction in found.answers["logit"]:
            tasks = prediction.routing.tasks
            right += sum(tasks[place] == task for place in prediction.weights.argmax(1).tolist())
            size += sum(len(chosen) for chosen in prediction.sets)
            total += len(prediction.sets)
    return {"task": right / total, "set_size": size / total}


def evaluate(setting: Setting, names: Collection[str], stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what is known of a set of tasks after every contender that is measured. Stored rows of the same experts and
    sentences are kept."""
    counts = {task: sum(len(labels) for _, labels in parts) for task, parts in setting.data.test.items()}
    experts = {task: answers.pack(bits.numpy()) for task, bits in setting.experts.items()}
    own = answers.read({"0": experts}, counts)
    rows = dict(stored["rows"]) if stored.get("experts") == experts else {}
    for contender in CONTENDERS:
        if contender.name not in names:
            continue
        row = rows[contender.name] = rows.get(contender.name) or measure(contender, setting)
        shown = {
            kind: answers.difference(answers.read({"0": row[kind]}, counts), None, own)
            for kind in ("label", "pair", "told")
        }
        text = ", ".join(f"{kind} {score.mean:.4f} ± {score.error:.4f}" for kind, score in shown.items())
        print(
            f"{contender.name:<28} {row['setting']}, {row['rule']}: {text}, {row['forwards']:.2f} forwards", flush=True
        )
        known = {each.name: rows[each.name] for each in CONTENDERS if each.name in rows}
        yield {"tasks": list(counts), "sentences": counts, "experts": experts, "rows": known}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["8", "distinct"])
    parser.add_argument("--only", nargs="+", choices=[each.name for each in CONTENDERS], help="these contenders")
    parser.add_argument("--quick", action="store_true", help="16 sentences a task, two contenders")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    results: dict[str, Any] = {"sets": {}}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    for name in ["distinct"] if options.quick else options.sets:
        tasks = SETS[name]
        sizes = Sizes(16, 8, 16, 16) if options.quick else Sizes.of(len(tasks))
        setting = prepare(options.cache, options.data, tasks, sizes)
        names = ("MASS", "TSV-M") if options.quick else options.only or [each.name for each in CONTENDERS]
        results["storage"] = {n: storage(setting.encoder, len(own)) for n, own in SETS.items() if n.isdigit()}
        for found in evaluate(setting, names, results["sets"].get(name, {})):
            results["sets"][name] = {"sizes": asdict(sizes), **found}
            record(options.json, results, seeds=[0], added=True)


if __name__ == "__main__":
    main()
