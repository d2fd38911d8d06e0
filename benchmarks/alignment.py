"""How fast and how good C²M³ is, against the algorithm as printed, in one run.

    python -m benchmarks.alignment [--quick] [--only compare starts assignments widths scale memory] [--json FILE]

compare   the same models matched by `merganser.align.universe` and by `benchmarks.alignment_reference` (pairs of
          models, dense matrices, `fminbound`). Goal: ≥ 10× at n = 3 and ≥ 25× at n = 5, the objective at least equal.
          The reference would take hours, so its first iterations are timed, and how many it takes and where it ends is
          found with a faster evaluation of the same numbers (and checked on the iterations that were timed): its time
          is that of one iteration × their number.
starts    five MLPs from the identity, where the published algorithm begins, and from the propagated start. Goal: ≥ 2×
          faster at an objective at least equal.
assignments  five MLPs, trained (from the zoo, if it has them) and untrained, by the compiled solver of assignments that
          starts from the last prices, and by scipy's: the same permutations. Goal: ≥ 2× faster for the trained.
widths    three ResNet20 of growing width: processor seconds, beside those that the thesis prints for its own program.
scale     time for one iteration at n = 2 … 20: its growth against n (1 is linear, 2 quadratic).
memory    the peak of a process that matches three ResNet20-16× (74M parameters). Goal: within 10 GB.

Ratios are of processor time, so that other work on the machine weighs on neither side. Networks are initialised from
seeds 0, 1, … and not trained: the hardest case for matching, and the same for both. `--quick` takes small networks.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.alignment_reference import Pairs, RunningSum, ascend, rounded
from benchmarks.machine import describe
from benchmarks.records import record
from benchmarks.zoo.architectures import MLP, ChannelLayerNorm, ResNet20
from benchmarks.zoo.cards import default_cache
from benchmarks.zoo.vision import load_model, model_directory
from merganser.align.derivation import symmetry
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.initialisation import start_placings
from merganser.align.placements import Placement, SoftImage
from merganser.align.solver import layout_and_weights, objective_of
from merganser.align.symmetries import Symmetry
from merganser.align.universes import universe
from merganser.kernels import linear_assignment

GOALS = {3: 10.0, 5: 25.0}
GIGABYTE = 1e9
PARTS = ("compare", "starts", "assignments", "widths", "scale", "memory")


def resnet20(width: int) -> nn.Module:
    """The thesis' ResNet20, whose shortcuts are 3×3: 4.655M parameters at width 4, 74.360M at width 16."""
    network = ResNet20(ChannelLayerNorm, width)
    for block in network.blocks:
        if isinstance(block.shortcut, nn.Sequential):
            conv = block.shortcut[0]
            block.shortcut[0] = nn.Conv2d(conv.in_channels, conv.out_channels, 3, conv.stride, padding=1, bias=False)
    return network


@dataclass(frozen=True)
class Network:
    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]

    def symmetry(self) -> Symmetry:
        return symmetry(self.make(), torch.randn(self.inputs))

    def states(self, count: int) -> list[dict[str, Tensor]]:
        found = []
        for seed in range(count):
            torch.manual_seed(seed)
            found.append(self.make().state_dict())
        return found


MLP_THESIS = Network("MLP", MLP, (2, 784))
RESNET = {width: Network(f"ResNet20-{width}×", partial(resnet20, width), (2, 3, 16, 16)) for width in (1, 2, 4, 8, 16)}
MLP_SMALL = Network("MLP-small", partial(MLP, 64, 10, (64, 128, 64)), (2, 64))


@dataclass(frozen=True)
class Comparison:
    """Seconds are of processor; `timed_iterations` of the reference were, the others follow from their mean.

    `deviation` is the largest relative difference of the objective, over the timed iterations, between the
    reference and the evaluation that told how many there are.
    """

    network: str
    models: int
    ours_seconds: float
    ours_iterations: int
    ours_objective: float
    timed_iterations: int
    reference_seconds_per_iteration: float
    reference_iterations: int
    reference_objective: float
    deviation: float

    @property
    def reference_seconds(self) -> float:
        return self.reference_seconds_per_iteration * self.reference_iterations

    @property
    def ratio(self) -> float:
        return self.reference_seconds / self.ours_seconds

    @property
    def ratio_of_iterations(self) -> float:
        """One iteration of the reference against one of ours, to which rounding and polish are added in equal parts."""
        return self.reference_seconds_per_iteration * self.ours_iterations / self.ours_seconds

    def as_dict(self) -> dict[str, object]:
        derived = ("reference_seconds", "ratio", "ratio_of_iterations")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        return (
            f"{self.network:12} n={self.models}  {self.ratio:5.1f}× (goal {GOALS[self.models]:.0f}×), "
            f"one iteration {self.ratio_of_iterations:.1f}×   "
            f"objective ours/reference {self.ours_objective / self.reference_objective:.4f}   "
            f"iterations {self.ours_iterations} / {self.reference_iterations}   "
            f"({self.ours_seconds:.1f} s against {self.reference_seconds_per_iteration:.2f} s for each of "
            f"{self.timed_iterations} iterations; deviation {self.deviation:.0e})"
        )


def spec_of(known: Symmetry) -> dict[str, tuple[str | None, ...]]:
    """The reference's table of permutations: one name or None for every axis."""
    return {name: tuple(axis[0].factors[0].atom for axis in known.axes[name]) for name in known.objective}


def compare(network: Network, count: int, timed: int = 3) -> Comparison:
    known, models = network.symmetry(), network.states(count)
    began = time.process_time()
    ours = universe(models, known)
    seconds = time.process_time() - began
    began = time.process_time()
    steps = list(ascend(Pairs(models, spec_of(known)), max_iterations=timed))
    spent = time.process_time() - began
    replay = RunningSum(models, known)
    replayed = list(ascend(replay))
    return Comparison(
        network=network.name,
        models=count,
        ours_seconds=seconds,
        ours_iterations=ours.iterations,
        ours_objective=ours.objective,
        timed_iterations=len(steps),
        reference_seconds_per_iteration=spent / len(steps),
        reference_iterations=len(replayed),
        reference_objective=objective_of(models, rounded(replay.matrices), known),
        deviation=max(abs(a.objective / b.objective - 1) for a, b in zip(steps, replayed, strict=False)),
    )


def starts(network: Network, count: int) -> dict[str, dict[str, float]]:
    """Processor seconds, objective and iterations of C²M³ from two starts."""
    known, models = network.symmetry(), network.states(count)
    found = {}
    for start in ("identity", "propagate"):
        began = time.process_time()
        solved = universe(models, known, start=start, workers=1)
        seconds = time.process_time() - began
        found[start] = {"seconds": seconds, "objective": solved.objective, "iterations": solved.iterations}
    return found


def assignments(models: Sequence[dict[str, Tensor]], known: Symmetry, repeats: int = 2) -> dict[str, float | bool]:
    """Median processor seconds of C²M³ with the compiled solver of assignments and with scipy's, in turn."""
    seconds: dict[str, list[float]] = {"compiled": [], "scipy": []}
    solved = []
    for name in ("compiled", "scipy") * repeats:
        solver = linear_assignment.library if name == "compiled" else lambda: None
        with patch.object(linear_assignment, "library", solver):
            began = time.process_time()
            solved.append(universe(models, known, workers=1))
            seconds[name].append(time.process_time() - began)
    same = all(
        np.array_equal(moved[atom], first[atom])
        for other in solved
        for moved, first in zip(other.permutations, solved[0].permutations, strict=True)
        for atom in first
    )
    return {name: median(own) for name, own in seconds.items()} | {"same_permutations": same}


def trained_mlps(count: int) -> list[dict[str, Tensor]] | None:
    """The weights of MLPs of the zoo, or None if it lacks some."""
    if not all(model_directory(default_cache(), "mlp", "mnist", seed).exists() for seed in range(count)):
        return None
    return [load_model("mlp", "mnist", seed).state_dict() for seed in range(count)]


def by_width(widths: Sequence[int], count: int = 3) -> dict[str, dict[str, float]]:
    """Processor seconds and iterations of C²M³ for ResNet20 of each width, and the parameters of one network."""
    found = {}
    for width in widths:
        known, models = RESNET[width].symmetry(), RESNET[width].states(count)
        began = time.process_time()
        solved = universe(models, known, workers=1)
        found[RESNET[width].name] = {
            "parameters": sum(tensor.numel() for tensor in models[0].values()),
            "seconds": time.process_time() - began,
            "iterations": solved.iterations,
        }
    return found


def scale(network: Network, counts: Sequence[int], iterations: int) -> dict[int, float]:
    """Processor seconds for one Frank-Wolfe iteration."""
    layout, weights = layout_and_weights(network.symmetry(), network.states(max(counts)))
    solver = FrankWolfe(tolerance=0.0, patience=iterations, max_iterations=iterations)
    found = {}
    for count in counts:
        placings = start_placings(layout, count, "identity", 0, frozenset())
        placement = Placement(layout, [SoftImage(layout, w, p) for w, p in zip(weights, placings, strict=False)])
        solver.run(placement)  # away from the identity, where assignments are easy, and with warm caches
        began = time.process_time()
        solver.run(placement)
        found[count] = (time.process_time() - began) / iterations
    return found


def growth(seconds: Mapping[int, float]) -> float:
    """The exponent between the second count and the last: time ∝ n^growth."""
    counts = sorted(seconds)
    low, high = counts[1], counts[-1]
    return math.log(seconds[high] / seconds[low]) / math.log(high / low)


def memory(width: int, iterations: int) -> float:
    """Peak resident gigabytes of a fresh process that matches three ResNet20 of a width."""
    code = f"from benchmarks.alignment import peak_of_universe; print(peak_of_universe({width}, {iterations}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def peak_of_universe(width: int, iterations: int) -> float:
    network = Network("", partial(resnet20, width), (2, 3, 8, 8))
    # Iterations and reheats do the same again in the same memory.
    universe(network.states(3), network.symmetry(), solver=FrankWolfe(max_iterations=iterations, reheats=0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGABYTE


def measured_before(path: Path | None) -> dict[str, Any]:
    """The parts a record holds already, so that they may be measured one by one."""
    return dict(json.loads(path.read_text())["results"]) if path and path.exists() else {}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    chosen = arguments.only or PARTS
    quick = arguments.quick
    found = measured_before(arguments.json) | {"threads": torch.get_num_threads(), "quick": quick}
    print(describe())
    if "compare" in chosen:
        cases = []
        for network in (MLP_SMALL, RESNET[1]) if quick else (MLP_THESIS, RESNET[4]):
            for count in (3,) if quick else tuple(GOALS):
                cases.append(compare(network, count))
                print(cases[-1], flush=True)
                found["compare"] = [case.as_dict() for case in cases]
                record(arguments.json, found, range(20), added=arguments.only is not None)
    if "starts" in chosen:
        network = MLP_SMALL if quick else MLP_THESIS
        found["starts"] = ends = starts(network, 5)
        ratio = ends["identity"]["seconds"] / ends["propagate"]["seconds"]
        gain = ends["propagate"]["objective"] / ends["identity"]["objective"]
        print(f"{network.name}, n = 5: propagated start {ratio:.1f}× (goal 2×), objective {gain:.4f} of the other's")
        record(arguments.json, found, range(20), added=arguments.only is not None)
    if "assignments" in chosen:
        network = MLP_SMALL if quick else MLP_THESIS
        cases_by_name = {"untrained": network.states(5)} | ({} if quick else {"trained": trained_mlps(5)})
        found["assignments"] = solvers = {
            name: assignments(models, network.symmetry()) for name, models in cases_by_name.items() if models
        }
        for name, case in solvers.items():
            ratio = case["scipy"] / case["compiled"]
            print(
                f"{network.name}, n = 5, {name}: {case['compiled']:.1f} s of processor, {ratio:.1f}× as fast as with "
                f"scipy's assignments (goal 2× for trained), the same permutations: {case['same_permutations']}"
            )
        record(arguments.json, found, range(20), added=arguments.only is not None)
    if "widths" in chosen:
        found["widths"] = by_width((1, 2) if quick else tuple(RESNET))
        for name, row in found["widths"].items():
            print(f"{name:12} n=3  {row['seconds']:.1f} s of processor, {row['iterations']:.0f} iterations")
        record(arguments.json, found, range(20), added=arguments.only is not None)
    if "scale" in chosen:
        counts = (2, 5, 10) if quick else (2, 5, 10, 20)
        seconds = scale(MLP_SMALL if quick else MLP_THESIS, counts, iterations=3 if quick else 5)
        print(
            f"time of an iteration ∝ n^{growth(seconds):.2f} from n = {counts[1]} to {counts[-1]} (goal 1)", flush=True
        )
        found["scale"] = {"seconds": seconds, "growth": growth(seconds)}
        record(arguments.json, found, range(20), added=arguments.only is not None)
    if "memory" in chosen:
        width = 4 if quick else 16
        peak = memory(width, iterations=2)
        print(f"peak of ResNet20-{width}×, n = 3: {peak:.1f} GB ({peak / 10:.2f} of the goal, 10 GB)")
        found["memory"] = {"width": width, "peak_gigabytes": peak}
        record(arguments.json, found, range(20), added=arguments.only is not None)


if __name__ == "__main__":
    main()
