"""What matching leaves to chance and choice: seeds, references, orders, starts, cycles that do not close, subsets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
from torch import nn

from merganser import align
from merganser.align.permutations import Permutations, apply, compose, identity
from merganser.align.state import State, average, state_of

Score = Callable[[State], float]


def seeds_against_none(
    models: Sequence[nn.Module], symmetry: align.Symmetry, score: Score, seeds: int
) -> dict[str, dict[str, float]]:
    """The objective and the midpoint's accuracy of the first two models: Git Re-Basin by seed, ours run twice."""
    first, second = models[:2]
    drawn = [align.match(first, second, symmetry, start="identity", tries=1, seed=seed) for seed in range(seeds)]
    ours = [align.universe([first, second], symmetry) for _ in range(2)]
    return {
        "Git Re-Basin": spread(
            [m.objective for m in drawn], [score(average([state_of(first), m.apply(second)])) for m in drawn]
        ),
        "C²M³": spread([u.objective for u in ours], [score(u.merged()) for u in ours])
        | {"same_permutations": float(all(_same(a, b) for a, b in zip(*(u.permutations for u in ours), strict=True)))},
    }


def spread(objectives: Sequence[float], accuracies: Sequence[float]) -> dict[str, float]:
    return {
        "runs": len(objectives),
        "objective": statistics.mean(objectives),
        "objective_std": statistics.pstdev(objectives),
        "accuracy": statistics.mean(accuracies),
        "accuracy_std": statistics.pstdev(accuracies),
        "lowest_accuracy": min(accuracies),
        "highest_accuracy": max(accuracies),
    }


def references(found: align.Universe, score: Score) -> dict[str, dict[str, float]]:
    """Every model in turn as the one that all others are matched to, and the universe of all."""
    ways = {
        f"model {reference}": align.match_to_reference(
            found.models, found.symmetry, reference, start="identity", tries=1
        )
        for reference in range(len(found))
    }
    return _scored(ways | {"C²M³": found}, score)


def orders(models: Sequence[nn.Module], symmetry: align.Symmetry, score: Score) -> dict[str, dict[str, float]]:
    """One model after another matched to the mean of those before it: best order first, its reverse, and as given."""
    best = align.merging_order(align.quality_matrix(models, symmetry))
    ways = {"best first": best, "best last": best[::-1], "as they come": list(range(len(models)))}
    return _scored({name: align.merge_in_order(models, symmetry, order) for name, order in ways.items()}, score)


def starts(models: Sequence[nn.Module], symmetry: align.Symmetry, score: Score, draws: int = 10) -> dict[str, Any]:
    """C²M³ from each start: the objective, the accuracy of the mean and the iterations; spread over random starts."""
    found = {}
    for start in ("propagate", "identity", "barycentre", "sinkhorn"):
        runs = [
            align.universe(models, symmetry, start=start, seed=seed)
            for seed in range(draws if start == "sinkhorn" else 1)
        ]
        iterations = statistics.mean(run.iterations for run in runs)
        reached = spread([run.objective for run in runs], [score(run.merged()) for run in runs])
        found[start] = reached | {"iterations": iterations}
    return found


def _scored(ways: Mapping[str, align.Universe], score: Score) -> dict[str, dict[str, float]]:
    return {name: {"objective": u.objective, "accuracy": score(u.merged())} for name, u in ways.items()}


def cycles(models: Sequence[nn.Module], symmetry: align.Symmetry) -> dict[str, dict[str, float]]:
    """How far models come home after a walk a → b → c → a through every three of them, relative to their norm."""
    states = [state_of(model) for model in models]
    universe = align.universe(models, symmetry)
    maps: dict[str, Callable[[int, int], Permutations]] = {
        "Git Re-Basin, pairs": _kept(
            lambda t, s: align.match(models[t], models[s], symmetry, start="identity", tries=1).permutations
        ),
        "Frank-Wolfe, pairs": _kept(
            lambda t, s: align.match(models[t], models[s], symmetry, method="frank_wolfe").permutations
        ),
        "C²M³": universe.pairwise,
    }
    rows = {}
    for name, between in maps.items():
        walks = [walk(states[a], symmetry, between, (a, b, c, a)) for a, b, c in combinations(range(len(states)), 3)]
        rows[name] = {
            "distance": statistics.mean(distance for distance, _ in walks),
            "largest_distance": max(distance for distance, _ in walks),
            "units_back": statistics.mean(home for _, home in walks),
        }
    return rows


def walk(
    state: State, symmetry: align.Symmetry, between: Callable[[int, int], Permutations], way: Sequence[int]
) -> tuple[float, float]:
    """‖back − start‖ / ‖start‖ after a walk, and the share of units that came back to their place."""
    total = identity(symmetry)
    for source, target in pairwise(way):
        total = compose(symmetry, total, between(target, source))
    back = apply(symmetry, total, state)
    floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
    gap = sum(float((back[n].double() - state[n].double()).square().sum()) for n in floats)
    norm = sum(float(state[n].double().square().sum()) for n in floats)
    home = identity(symmetry)
    hits = sum(int((total[name] == home[name]).sum()) for name in home)
    return (gap / norm) ** 0.5, hits / sum(index.size for index in home.values())


def subsets(found: align.Universe, score: Score, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """All subsets of some sizes: matched jointly with the other models, and by themselves."""
    rows = {}
    for size in sizes:
        compared = align.compare_subsets(found, size=size, score=score)
        joint = [row.joint_score or 0.0 for row in compared]
        separate = [row.separate_score or 0.0 for row in compared]
        rows[f"{size} of {len(found)}"] = {
            "subsets": len(compared),
            "joint_accuracy": statistics.mean(joint),
            "separate_accuracy": statistics.mean(separate),
            "joint_lowest": min(joint),
            "separate_lowest": min(separate),
            "objective_ratio": statistics.mean(row.joint_objective / row.separate_objective for row in compared),
        }
    return rows


def _kept(between: Callable[[int, int], Permutations]) -> Callable[[int, int], Permutations]:
    known: dict[tuple[int, int], Permutations] = {}

    def recall(target: int, source: int) -> Permutations:
        if (target, source) not in known:
            known[target, source] = between(target, source)
        return known[target, source]

    return recall


def _same(a: Permutations, b: Permutations) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
