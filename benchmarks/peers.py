"""The same merges of eight MiniLM text experts by us, mergekit and FusionBench: quality, time and memory.

    python -m benchmarks.peers --mergekit BIN --fusionbench BIN [--cache ZOO] [--test N] [--quick] [--json FILE]

BIN is the bin directory of an environment with that program (`pip install mergekit`, `pip install fusion-bench`); a
program that is not given is left out. A quarter of an hour; `--quick`: two methods, few sentences.

All merge the same float32 directories with the same hyper-parameters and write a directory, which is scored by the
same code: accuracy on test sentences of every task through its own head, over that of the task's expert. Time and
memory are of a whole process, from its start to a synced output: our and mergekit's commands, and a script of a few
lines around FusionBench's model pool and algorithms, whose own command wants a configured benchmark. What a process
costs that only loads the program is stored beside.

Where the definitions differ:

- TIES: mergekit ranks entries tensor by tensor, FusionBench over the whole model as the paper does; each is compared
  with ours in its scope. Ours keeps ⌊density·n⌋ entries exactly, of equal magnitudes the first; mergekit as many, of
  equal magnitudes any; FusionBench one more and all of its magnitude. Float32 differences have many equal ones.
- mergekit 0.1.5 ends with a TypeError on its own definition of BertModel, so it is given the same encoders named as
  parts of a token classifier, which it has no definition of and can infer.
- DARE-TIES: the draws differ, so quality is a mean over seeds.
- TSV-M and Iso-C: FusionBench takes the plain polar factor, in which every direction has full length; ours drops
  those below 1e-5 of the largest.

Stored in `results`:

- `sentences`: test sentences of each task, `reference`: accuracies of the experts, `settings`: parameters by method;
- `programs`: `version`, and `seconds`, `cpu_seconds`, `peak_anonymous` of loading the program alone;
- `rows`: `method`, `program`, `accuracy`, `normalised`, `per_task`, `seconds`, `cpu_seconds` (medians over seeds),
  `peak_anonymous` (bytes, the largest), `difference` from our result (norm, relative to that of our task vector; null
  for ours and where a method draws), and for methods that draw `seeds` and `spread` (of `normalised`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.experts import State, floats, summary
from benchmarks.measuring import Run, measure, median
from benchmarks.merge_speed import warm
from benchmarks.records import record
from benchmarks.text_experts import TextExperts, load_experts
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text import expert_directory
from benchmarks.zoo.text_tasks import TASKS

SEEDS = (0, 1, 2)
MERGANSER, MERGEKIT, FUSIONBENCH = "Merganser", "mergekit", "FusionBench"
#: The distribution of each program, and what a process imports that is about to merge with it.
PACKAGES = {
    MERGANSER: ("merganser", "import merganser.recipes.running"),
    MERGEKIT: ("mergekit", "import mergekit.scripts.run_yaml"),
    FUSIONBENCH: ("fusion-bench", "from fusion_bench.method import TaskArithmeticAlgorithm"),
}
BASE = "_pretrained_"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
FUSION = """
import json, sys
from fusion_bench import BaseModelPool, method
from omegaconf import DictConfig
job = json.load(open(sys.argv[1]))
loader = {"_target_": "transformers.BertModel.from_pretrained"}
models = {name: loader | {"pretrained_model_name_or_path": path} for name, path in job["models"].items()}
algorithm = getattr(method, job["algorithm"])(**job["options"])
algorithm.run(BaseModelPool(DictConfig(models))).save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True)
class Case:
    """One merge in everyone's words. `mergekit`: parameters of each model for the method of the same name;
    `fusionbench`: an algorithm's class and arguments. Who has no words for it leaves it out."""

    method: str
    parameters: Mapping[str, Any]
    mergekit: Mapping[str, Any] | None = None
    fusionbench: tuple[str, Mapping[str, Any]] | None = None
    base: bool = True
    draws: bool = False


TIES = {"scaling_factor": 1.0, "threshold": 20, "remove_keys": [], "merge_func": "mean"}
CASES = {
    "weight averaging": Case("linear", {}, {"weight": 1.0}, ("SimpleAverageAlgorithm", {}), base=False),
    "task arithmetic": Case(
        "task_arithmetic", {"scale": 0.2}, {"weight": 0.2}, ("TaskArithmeticAlgorithm", {"scaling_factor": 0.2})
    ),
    "TIES, by tensor": Case("ties", {"density": 0.2}, {"weight": 1.0, "density": 0.2}),
    "TIES, whole model": Case(
        "ties", {"density": 0.2, "scope": "global"}, fusionbench=("TiesMergingAlgorithm", TIES)
    ),
    "DARE-TIES": Case(
        "dare_ties", {"density": 0.5, "weight": 0.2}, {"density": 0.5, "weight": 0.2}, draws=True
    ),
    "TSV-M": Case("tsv", {"scale": 1.0}, fusionbench=("TaskSingularVectorMerging", {"alpha": 1.0})),
    "Iso-C": Case("iso_c", {"scale": 1.5}, fusionbench=("ISO_C_Merge", {"scaling_factor": 1.5})),
}  # fmt: skip
#: How mergekit is given an encoder: names with a prefix, without the pooler (nobody trained it), and with a classifier.
PREFIX, UNTRAINED = "bert.", "pooler."
CLASSIFIER = {"classifier.weight": torch.zeros(2, 384), "classifier.bias": torch.zeros(2)}


def as_classifier(source: Path, target: Path) -> Path:
    """A copy of an encoder as a token classifier."""
    target.mkdir(parents=True)
    named = {PREFIX + name: value for name, value in floats(source).items() if not name.startswith(UNTRAINED)}
    save_file(named | CLASSIFIER, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["BertForTokenClassification"]}))
    return target


@dataclass(frozen=True)
class Bench:
    """The base and experts, as encoders and as classifiers, bin directories of the other programs, a place to work."""

    encoders: Mapping[str, Path]
    classifiers: Mapping[str, Path]
    bins: Mapping[str, Path]
    workdir: Path

    @property
    def programs(self) -> list[str]:
        return [MERGANSER, *self.bins]

    def job(self, program: str, case: Case, seed: int) -> tuple[list[str], dict[str, Any]] | None:
        """A command without its last arguments, and the file that describes the merge to it."""
        models = self.classifiers if program == MERGEKIT else self.encoders
        base, *paths = [str(path.absolute()) for path in models.values()]
        if program == MERGANSER:
            ours = {"method": case.method, "models": paths, "parameters": dict(case.parameters), "seed": seed}
            return [sys.executable, "-m", "merganser", "merge"], ours | ({"base": base} if case.base else {})
        if program == MERGEKIT and case.mergekit is not None:
            entries = [{"model": path, "parameters": dict(case.mergekit)} for path in paths]
            theirs = {"merge_method": case.method, "models": entries, "dtype": "float32"}
            command = [str(self.bins[program] / "mergekit-yaml"), "--no-copy-tokenizer", "--random-seed", str(seed)]
            return command, theirs | ({"base_model": base} if case.base else {})
        if program == FUSIONBENCH and case.fusionbench is not None:
            algorithm, options = case.fusionbench
            pool = dict(zip(models, [base, *paths], strict=True))
            command = [str(self.bins[program] / "python"), "-c", FUSION]
            return command, {"models": pool, "algorithm": algorithm, "options": dict(options)}
        return None

    def merge(self, program: str, case: Case, seed: int) -> tuple[State, Run] | None:
        """What a program writes, and what it took; None if it has no words for the case."""
        found = self.job(program, case, seed)
        if found is None:
            return None
        command, description = found
        job, out = self.workdir / "job.json", self.workdir / "out"
        job.write_text(json.dumps(description))
        warm(list((self.classifiers if program == MERGEKIT else self.encoders).values()))
        run = measure([*command, str(job), str(out)], out, OFFLINE)
        merged = {name.removeprefix(PREFIX): value for name, value in floats(out).items() if name not in CLASSIFIER}
        pooler = {name: value for name, value in floats(self.encoders[BASE]).items() if name.startswith(UNTRAINED)}
        return pooler | merged, run

    def loading(self, program: str) -> dict[str, Any]:
        """A program's version, and what it costs to load it."""
        python = str(self.bins[program] / "python") if program in self.bins else sys.executable
        package, code = PACKAGES[program]
        version = subprocess.run([python, "-c", VERSION, package], check=True, capture_output=True, text=True).stdout
        run = measure([python, "-c", code], self.workdir / "nothing", OFFLINE)
        return {"version": version.strip(), **asdict(run)}


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over runs of every score."""
    tasks = runs[0]["per_task"]
    return {
        **{key: statistics.fmean(run[key] for run in runs) for key in ("accuracy", "normalised")},
        "per_task": {task: statistics.fmean(run["per_task"][task] for run in runs) for task in tasks},
    }


@dataclass(frozen=True)
class Judge:
    """Scores weights by the tasks' test sentences."""

    experts: TextExperts
    reference: Mapping[str, float]

    def row(self, weights: Sequence[State], runs: Sequence[Run], ours: State | None) -> dict[str, Any]:
        """Quality over the seeds' weights, costs over their runs."""
        found = [summary(self.experts.scores(state, list(self.reference)), self.reference) for state in weights]
        drawn: dict[str, Any] = {}
        if len(found) > 1:
            drawn = {
                "seeds": list(SEEDS[: len(found)]),
                "spread": statistics.stdev(each["normalised"] for each in found),
            }
        gap = None if ours is None else self.difference(weights[0], ours)
        return {**mean_of(found), **asdict(median(list(runs))), "difference": gap, **drawn}

    def difference(self, theirs: State, ours: State) -> float:
        """‖theirs − ours‖ / ‖ours − base‖."""
        base = self.experts.base
        gap = sum(float((theirs[name] - ours[name]).double().square().sum()) for name in base)
        return float((gap / sum(float((ours[name] - base[name]).double().square().sum()) for name in base)) ** 0.5)


def compare(bench: Bench, judge: Judge, name: str, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One method by every program that has it, once, or with every seed where it draws."""
    case, ours, rows = CASES[name], None, []
    for program in bench.programs:
        merges = [bench.merge(program, case, seed) for seed in (seeds if case.draws else seeds[:1])]
        made = [merge for merge in merges if merge is not None]
        if not made:
            continue
        states = [state for state, _ in made]
        row = judge.row(states, [run for _, run in made], None if case.draws else ours)
        ours = states[0] if ours is None else ours
        rows.append({"method": name, "program": program, **row})
        apart = "" if row["difference"] is None else f"  differs {row['difference']:.1e}"
        print(
            f"{name:<18}{program:<12}{row['normalised']:>8.4f}{row['seconds']:>8.1f} s{row['cpu_seconds']:>8.1f} s CPU"
            f"{row['peak_anonymous'] / 2**20:>8.0f} MiB{apart}",
            flush=True,
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="bin directory of an environment with mergekit")
    parser.add_argument("--fusionbench", type=Path, help="bin directory of an environment with FusionBench")
    parser.add_argument("--test", type=int, default=300, help="test sentences of each task")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.test = 20
    seeds = SEEDS[:1] if options.quick else SEEDS
    names = list(CASES)[:2] if options.quick else list(CASES)
    experts = load_experts(options.cache, options.data, test=options.test, validation=0)
    judge = Judge(experts, experts.own_scores(experts.experts))
    given = {MERGEKIT: options.mergekit, FUSIONBENCH: options.fusionbench}
    bins = {program: path for program, path in given.items() if path is not None}
    encoders = {BASE: options.cache / "text" / "base"} | {t: expert_directory(options.cache, t) for t in TASKS}
    with tempfile.TemporaryDirectory() as temporary:
        workdir = Path(temporary)
        classifiers = {
            name: as_classifier(path, workdir / "classifiers" / name)
            for name, path in encoders.items()
            if MERGEKIT in bins
        }
        bench = Bench(encoders, classifiers, bins, workdir)
        results: dict[str, Any] = {
            "sentences": options.test,
            "reference": dict(judge.reference),
            "settings": {name: {"method": CASES[name].method, **CASES[name].parameters} for name in names},
            "programs": {program: bench.loading(program) for program in bench.programs},
            "rows": [],
        }
        for name in names:
            results["rows"] += compare(bench, judge, name, seeds)
            record(options.json, results, seeds)


if __name__ == "__main__":
    main()
