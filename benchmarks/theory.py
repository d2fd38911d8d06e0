"""Task vectors as gradients: the thesis' statements on real data.

    python -m benchmarks.theory [--cache ZOO] [--test N] [--quick] [--json FILE]

Three minutes of one core (`--quick`: the small networks only). Three parts:

1. A small tanh network on handwritten digits in float64; the tasks are four views of the same images. Experts by
   full-batch gradient descent, added up, against joint descent with the matched step: equal after one epoch, then apart
   by −αη²C + O(η³) (docs/theory.md): on log-log axes the gap has slope 2 in η, and what is left of it slope 3.
2. Tiny networks (5–7–3, float64, three tasks of random points): the same slopes with the term as the thesis
   prints it and as it follows, and both bounds on ‖C‖ against what they bound.
3. The eight text experts: task arithmetic with the encoders as they were after one epoch against the final ones, α
   chosen on validation sentences, and how well the first epoch's task vector points to the last one's.

Stored in `results`:

- `one_epoch`: by `alpha`, the `gap` ‖θ_TA − θ_MT‖ after one epoch and `relative` to the distance travelled;
- `orders`: by `alpha` and `epochs`, the slopes `gap_slope` (theory: 2), `corrected_slope` (3) and `printed_slope` (2:
  the term as the thesis prints it removes nothing), and the `gaps` they come from, by `eta`;
- `small`: `orders` as above; `bounds`: by `network` and `alpha`, the measured norms `c`, `hessian`, `gradient` (the
  largest ones on the path), and `printed_` and `corrected_` bounds of each;
- `epochs`: by task, how many epochs its expert was trained, as its card says;
- `merging`: for `experts` "first epoch" and "last epoch", `alpha`, merged `accuracy` and `normalised` (by the experts
  of the last epoch), `own`, the experts' mean accuracy on their own tasks, `own_normalised`, and `per_task`;
- `merging_sweep`: mean validation accuracy by `experts` and `alpha`;
- `trajectories`: by `task`, `cosine` = cos(τ_1, τ_K), `first_share` (the share of the first epoch in the length of the
  path), `straightness`; `verdict` is that of `merganser.analysis.trajectory.linear_regime`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experts import summary
from benchmarks.multi_task import SUMS, Bench, best
from benchmarks.printed_statements import Statement, printed_bound, remainder, slope
from benchmarks.records import record
from benchmarks.text_experts import TextExperts, load_experts
from benchmarks.zoo.cards import add_locations, read_card
from benchmarks.zoo.text import expert_directory
from benchmarks.zoo.text_tasks import TASKS
from merganser.analysis.gradients import TaskLosses, check_bound, gap, observed_order
from merganser.analysis.trajectory import linear_regime
from merganser.digits import Digits

ETAS = (0.01, 0.005, 0.0025, 0.00125)
IMAGES = 400
#: Networks on which the bounds are measured: activation, factor on the initial weights, α (None: one over the tasks).
BOUNDED: Mapping[str, tuple[type[nn.Module], float, float | None]] = {
    "tanh": (nn.Tanh, 1.0, None),
    "linear": (nn.Identity, 1.0, 1.0),
    "ReLU, weights × 0.1": (nn.ReLU, 0.1, 1.0),
    "tanh, weights × 0.03": (nn.Tanh, 0.03, 1.0),
}


def digits_losses(images: int = IMAGES) -> TaskLosses:
    """A 64–32–10 tanh network in float64, trained a little on all views, and its loss on each of them."""
    digits = Digits()
    pictures, labels = digits.test("upright")
    data: dict[str, tuple[Tensor, Tensor]] = {
        task: (view(pictures[:images]).flatten(1).double(), labels[:images]) for task, view in Digits.tasks.items()
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    optimiser = torch.optim.SGD(network.parameters(), 0.5)
    for _ in range(30):
        optimiser.zero_grad()
        torch.stack([nn.functional.cross_entropy(network(x), y) for x, y in data.values()]).sum().backward()
        optimiser.step()
    return TaskLosses.of(network, nn.functional.cross_entropy, data)


def small_losses(activation: type[nn.Module], *, bias: bool, scale: float = 1.0, tasks: int = 3) -> TaskLosses:
    """A 5–7–3 network in float64 with its initial weights times `scale`, and tasks of 16 random points of 3 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(5, 7, bias=bias), activation(), nn.Linear(7, 3, bias=bias)).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(scale)
    generator = torch.Generator().manual_seed(1)
    data = {}
    for task in range(tasks):
        points = torch.randn(16, 5, generator=generator, dtype=torch.float64) + 0.7 * task
        data[f"t{task}"] = (points, torch.randint(0, 3, (16,), generator=generator))
    return TaskLosses.of(network, nn.functional.cross_entropy, data)


def bounds(eta: float = ETAS[0], epochs: int = 3) -> list[dict[str, Any]]:
    """‖C‖, and the largest gradient and Hessian on the path, against the bounds as printed and as they follow."""
    rows = []
    for name, (activation, scale, alpha) in BOUNDED.items():
        losses = small_losses(activation, bias=False, scale=scale)
        alpha = 1 / len(losses.tasks) if alpha is None else alpha
        check = check_bound(losses, eta=eta, alpha=alpha, epochs=epochs)
        statement: Statement = "relu_appendix" if activation is nn.ReLU else "general"
        printed = printed_bound(
            check.constants, tasks=len(losses.tasks), alpha=alpha, epochs=epochs, statement=statement
        )
        row: dict[str, Any] = {"network": name, "alpha": alpha, "eta": eta, "epochs": epochs}
        row |= {"c": check.measured, "hessian": check.measured_hessian, "gradient": check.measured_gradient}
        for way, bound in (("printed", printed), ("corrected", check.bound)):
            found = {"c": bound.total, "hessian": bound.hessian, "gradient": bound.gradient}
            row |= {f"{way}_{key}": value for key, value in found.items()}
        rows.append(row)
        print(f"{name}: ‖C‖ {row['c']:.3g}, printed {row['printed_c']:.2g}, right {row['corrected_c']:.3g}", flush=True)
    return rows


def one_epoch(losses: TaskLosses, alphas: Sequence[float], eta: float = ETAS[0]) -> list[dict[str, float]]:
    """Task arithmetic after one epoch against one joint step."""
    found = []
    for alpha in alphas:
        each = gap(losses, eta=eta, alpha=alpha, epochs=1)
        found.append({"alpha": alpha, "eta": eta, "gap": each.gap, "relative": each.relative})
        print(f"one epoch, α {alpha:.2f}: gap {each.relative:.1e} of the distance travelled", flush=True)
    return found


def orders(losses: TaskLosses, alphas: Sequence[float], epochs: Sequence[int]) -> list[dict[str, Any]]:
    """Observed orders in η."""
    found = []
    for alpha in alphas:
        for count in epochs:
            order = observed_order(losses, ETAS, alpha=alpha, epochs=count)
            printed = [remainder(losses, eta=eta, alpha=alpha, epochs=count, factor=1) for eta in ETAS]
            slopes = {"gap": order.gap_slope, "corrected": order.residual_slope, "printed": slope(ETAS, printed)}
            gaps = [{"eta": g.eta, "gap": g.gap, "relative": g.relative, "residual": g.residual} for g in order.gaps]
            row = {"alpha": alpha, "epochs": count, **{f"{k}_slope": v for k, v in slopes.items()}, "gaps": gaps}
            found.append(row)
            text = ", ".join(f"{name} {value:.3f}" for name, value in slopes.items())
            print(f"{count} epochs, α {alpha:.2f}: slopes {text}", flush=True)
    return found


def early_and_late(
    early: TextExperts, late: TextExperts, reference: Mapping[str, float]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Task arithmetic of both sets of experts, and the sweeps that chose α."""
    rows, sweeps = [], []
    for label, experts in (("first epoch", early), ("last epoch", late)):
        names = tuple(experts.experts)
        vector = experts.task_vector("task_arithmetic", names)
        sweep = Bench(names, {0: experts}).sweep(vector, SUMS)
        sweeps += [{"experts": label, "alpha": alpha, "accuracy": score} for alpha, score in sweep.items()]
        own = summary(reference if experts is late else experts.own_scores(experts.experts), reference)
        merged = summary(experts.scores(experts.weights(vector, best(sweep)), names), reference)
        print(f"{label}: α {best(sweep)}, merged {merged['normalised']:.4f}, own {own['normalised']:.4f}", flush=True)
        row = {"experts": label, "alpha": best(sweep), **merged}
        rows.append(row | {"own": own["accuracy"], "own_normalised": own["normalised"]})
    return rows, sweeps


def trained_epochs(cache: Path, task: str) -> int:
    """How long an expert was trained, from its card."""
    card = read_card(expert_directory(cache, task))
    assert card is not None, "loading the experts trains those that are missing"
    return card.epochs


def trajectories(early: TextExperts, late: TextExperts) -> tuple[list[dict[str, Any]], str]:
    """Each run from base over epoch 1 to the end, and the verdict on all."""
    start = late.trained
    regime = linear_regime({name: [start, early.experts[name], late.experts[name]] for name in late.experts})
    rows: list[dict[str, Any]] = [
        {
            "task": name,
            "cosine": run.cosines[-1],
            "first_share": run.shares[0],
            "straightness": run.straightness[-1],
        }
        for name, run in regime.runs.items()
    ]
    for row in rows:
        print("{task:>9}: cos(τ_1, τ_K) {cosine:.3f}, first epoch {first_share:.0%}".format(**row), flush=True)
    return rows, regime.verdict


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", type=int, default=250, help="test sentences of each task")
    parser.add_argument("--validation", type=int, default=40, help="validation sentences of each task")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    losses = digits_losses()
    alphas = (1 / len(losses.tasks), 0.5, 1.0)
    results: dict[str, Any] = {
        "one_epoch": one_epoch(losses, alphas),
        "orders": orders(losses, alphas[:1] if options.quick else alphas, (2,) if options.quick else (2, 5)),
        "small": {"orders": orders(small_losses(nn.Tanh, bias=True), (0.3, 1 / 3, 1.0), (2, 4)), "bounds": bounds()},
    }
    if not options.quick:
        early, late = (
            load_experts(
                options.cache, options.data, TASKS, test=options.test, validation=options.validation, early=early
            )
            for early in (True, False)
        )
        results["sentences"] = {name: min(options.test, len(task.test)) for name, task in late.tasks.items()}
        results["epochs"] = {name: trained_epochs(options.cache, name) for name in late.tasks}
        results["trajectories"], results["verdict"] = trajectories(early, late)
        reference = late.own_scores(late.experts)
        results["merging"], results["merging_sweep"] = early_and_late(early, late, reference)
    record(options.json, results, [0])


if __name__ == "__main__":
    main()
