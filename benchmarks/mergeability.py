"""Does the label-free mergeability score rank pairs of text experts by what merging them really costs?

    python -m benchmarks.mergeability [--cache ZOO] [--test N] [--quick] [--json FILE]

Three minutes of one core (`--quick`: the six pairs of four experts, few sentences). Every two of the eight experts
are averaged (task arithmetic with α = ½) and scored on test sentences of their two tasks, each through its own head.
The loss of a pair is 1 − normalised accuracy. The score looks at weights only (`merganser.analysis.mergeability`).

Stored in `results`:

- `sentences`: test sentences of each task, `experts`: accuracy of each expert on its own task;
- `pairs`: `a`, `b`, the `difficulty` guessed, its signals, the `loss` measured and the accuracies `accuracy_a`,
  `accuracy_b` of the merge;
- `correlations`: for the difficulty and for every signal alone, Spearman's `rho` with the loss over all pairs, its
  two-sided `p` value under exchangeability (pairs share experts, so it is optimistic), and how many `pairs` there were.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from benchmarks.experts import summary
from benchmarks.records import record
from benchmarks.text_experts import TextExperts, load_experts
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text_tasks import TASKS
from merganser.analysis.mergeability import Pair, mergeability, rank_correlation

SIGNALS = ("difficulty", "conflict", "overlap", "cosine", "sign_agreement", "distance", "imbalance", "bend")


def pair_row(pair: Pair, scores: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, Any]:
    """What was guessed of a pair, and what merging cost."""
    a, b = pair.experts
    loss = 1 - summary({a: scores[a], b: scores[b]}, reference)["normalised"]
    signals = {name: getattr(pair, name) for name in SIGNALS}
    return {"a": a, "b": b, **signals, "loss": loss, "accuracy_a": scores[a], "accuracy_b": scores[b]}


def correlations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Spearman's ρ of the difficulty and each of its signals with the loss."""
    losses = [row["loss"] for row in rows]
    found = []
    for signal in SIGNALS:
        values = [row[signal] for row in rows]
        if any(value is None for value in values) or len(set(values)) < 2:
            continue
        p = float(spearmanr(values, losses).pvalue)
        found.append({"signal": signal, "rho": rank_correlation(values, losses), "p": p, "pairs": len(rows)})
    return found


def measure(experts: TextExperts, early: TextExperts, reference: Mapping[str, float]) -> list[dict[str, Any]]:
    """Every pair, guessed and merged."""
    trained = experts.trained
    runs = {name: [trained, early.experts[name], expert] for name, expert in experts.experts.items()}
    guessed = mergeability(trained, dict(experts.experts), runs=runs)
    rows = []
    for pair in guessed.pairs:
        vector = experts.task_vector("task_arithmetic", pair.experts)
        rows.append(pair_row(pair, experts.scores(experts.weights(vector, 0.5), pair.experts), reference))
        print("{a:>9} + {b:<9} difficulty {difficulty:.3f}, loss {loss:+.4f}".format(**rows[-1]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", type=int, default=300, help="test sentences of each task")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    names, test = (TASKS[:4], 50) if options.quick else (TASKS, options.test)
    experts, early = (
        load_experts(options.cache, options.data, names, test=test, validation=0, early=early)
        for early in (False, True)
    )
    reference = experts.own_scores(experts.experts)
    rows = measure(experts, early, reference)
    found = correlations(rows)
    for each in found:
        print(f"ρ({each['signal']}, loss) = {each['rho']:+.3f}, p {each['p']:.3g}", flush=True)
    sentences = {name: min(test, len(task.test)) for name, task in experts.tasks.items()}
    record(options.json, {"sentences": sentences, "experts": reference, "pairs": rows, "correlations": found}, [0])


if __name__ == "__main__":
    main()
