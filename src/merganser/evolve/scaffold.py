"""Write a first run file with comments from models and tasks, for `merganser evolve init`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from merganser.errors import InputError
from merganser.evaluate.harness import HARNESS
from merganser.evaluate.language import kind_of_model
from merganser.evaluate.tasks import Task
from merganser.methods.registry import lookup, parameters

#: Items asked of a candidate, for tasks that have many more.
SUBSET = 60
#: Bounds of parameters that are worth searching, if a method has them, with their meaning.
RANGES = {
    "weight": ("low: 0, high: 1.5, per: model", "how much of each model; `points: 3` lets it vary over the depth"),
    "density": ("low: 0.1, high: 1.0", "share of each difference from the base to keep"),
    "scale": ("low: 0.3, high: 1.5", "factor of the merged difference"),
    "t": ("low: 0, high: 1", "position between the two models"),
}


def render_run_file(
    models: Mapping[str, str],
    tasks: Sequence[Task],
    *,
    base: str | None = None,
    method: str | None = None,
    root: str | os.PathLike[str] = ".",
) -> str:
    """Return the text of a commented run file.

    Args:
        models: Paths or hub ids of the models to merge, by label.
        tasks: The tasks; every question is checked.
        base: The model they were fine-tuned from.
        method: The merging method; task arithmetic with a base, else linear.
        root: The directory of the run file; paths are written relative to it.

    Returns:
        YAML, for `merganser evolve run`.

    Raises:
        InputError: If there is no model or task, a question is invalid, or the method has nothing to search.

    Example:
        >>> render_run_file({"math": "./math"}, [Task.parse("multiple-choice:quiz.jsonl")])  # doctest: +SKIP
    """
    if not models or not tasks:
        raise InputError(f"a study needs {'models' if not models else 'tasks'}; name at least one")
    chosen = method or ("task_arithmetic" if base else "linear")
    declared = parameters(lookup(chosen))
    space = {name: found for name, found in RANGES.items() if name in declared}
    if "weight" in space:
        space.pop("scale", None)  # a factor on all weights, which are searched already
    if not space:
        raise InputError(f"{chosen}: has no parameter with default bounds; write its search space by hand")
    lines = ["# A search for a merge, for `merganser evolve run`; a dry run explains and checks it."]
    if base:
        lines.append(f"base: {_write_path(base, root)}")
    lines += ["models:", *(f"  {json.dumps(label)}: {_write_path(path, root)}" for label, path in models.items())]
    lines += [f"method: {chosen}", "space:"]
    for name, (bounds, meaning) in space.items():
        per_model = declared[name].per_model
        lines.append(f"  {name}: {{{bounds if per_model else bounds.replace(', per: model', '')}}}  # {meaning}")
    lines.append("tasks:")
    for task in tasks:
        count = task.count("")
        pool = count - max(1, round(0.2 * count))
        few = f", subset: {SUBSET}" if pool > SUBSET else ""
        asked = f"{SUBSET} of them" if few else f"{pool}, all but those held out for the test,"
        lines.append(f"  # {count} questions; {asked} are asked of a candidate")
        source = f"task: {json.dumps(task.path)}" if task.kind == HARNESS else f"data: {_write_path(task.path, root)}"
        lines.append(f"  {json.dumps(task.name)}: {{kind: {task.kind}, {source}{few}}}")
    lines += _write_objectives(tasks)
    lines += [
        "search:",
        "  algorithm: ga     # with several objectives nsga2; de, cmaes, random …",
        "  population: 25",
        "  generations: 7    # population × generations merges are evaluated",
        "  race: 5           # stop candidates that gain little: check after 5, 10, 20 … questions",
        "  rerank: 3         # the best candidates are asked everything at the end",
        "  seed: 0",
        f"model: {{kind: {_find_kind(base or next(iter(models.values())))}}}     # dtype: bfloat16, device: cuda …",
        "answers: ./answers.sqlite    # cache of the models' own answers, shared between studies",
        "workers: 1                   # processes that merge and ask, each with a network of its own",
    ]
    return "\n".join(lines) + "\n"


def _find_kind(model: str) -> str:
    """Return the kind of loader for a model's config; `causal-lm` for a model that is not available."""
    directory = Path(model)
    return (kind_of_model(directory) if directory.is_dir() else None) or "causal-lm"


def _write_objectives(tasks: Sequence[Task]) -> list[str]:
    """Return the mean of the scores as objective; measures with another direction are objectives of their own."""
    higher = [task.name for task in tasks if task.higher_is_better]
    lower = [task.name for task in tasks if not task.higher_is_better]
    lines = ["objectives:             # several give a Pareto front: use algorithm: nsga2"]
    if len(higher) == 1:
        lines.append(f"  - {json.dumps(higher[0])}")
    elif higher:
        shares = ", ".join(f"{json.dumps(name)}: {1 / len(higher):.4g}" for name in higher)
        lines.append(f"  - {{name: mean, measures: {{{shares}}}}}")
    lines += [f"  - {json.dumps(name)}" for name in (lower if not higher else [])]
    lines += [f"  # - {json.dumps(name)}         # lower is better" for name in (lower if higher else [])]
    return lines


def _write_path(path: str, root: str | os.PathLike[str]) -> str:
    """Return a path relative to the run file, in quotes; a hub id unchanged."""
    if not os.path.exists(path):
        return json.dumps(path)
    beside = Path(os.path.relpath(path, root)).as_posix()
    return json.dumps(beside if beside.startswith("..") else f"./{beside}")
