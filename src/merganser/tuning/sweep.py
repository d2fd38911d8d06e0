"""Sweeps: vary values of a recipe, merge every variant in memory and score it.

All variants are planned before the first is merged, so that problems are reported at once. Scores are written to a file
of JSON lines; an interrupted sweep continues from there.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from merganser import recipes
from merganser.checkpoints.hashing import content_hash
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.execute import execute
from merganser.engine.merge import Merge
from merganser.engine.modules import ModuleSink, ModuleTensors
from merganser.engine.sinks import DictSink
from merganser.engine.source_files import SourceFiles
from merganser.errors import InputError, did_you_mean
from merganser.evaluate.search import ScaleSearch, successive_halving
from merganser.evaluate.tasks import Task
from merganser.notebooks import Shown
from merganser.plain import Result
from merganser.recipes import documents
from merganser.recipes.loading import acting_parameters, method_key
from merganser.tuning.score_journal import ScoreJournal

Over: TypeAlias = Mapping[str, Sequence[Any]]
VariantScore: TypeAlias = "Callable[[Variant, int], float]"


@dataclass(frozen=True, eq=False)
class Variant:
    """One planned recipe of a sweep; it is merged only on request."""

    values: Mapping[str, Any]
    document: Mapping[str, Any]
    merge: Merge

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())

    def fingerprint(self) -> str:
        """Return the identity of the merge, from its plan and every byte of its sources; the key of its scores."""
        return self.merge.plan.fingerprint([content_hash(source) for source in self.merge.sources])

    def weights(self) -> dict[str, Tensor]:
        """Return the merged state dict."""
        sink = DictSink(self.merge.plan)
        execute(self.merge, sink)
        return sink.result()

    def into(self, module: nn.Module) -> nn.Module:
        """Load the merged weights into the module and return it."""
        tensors = ModuleTensors(module)
        tensors.check(self.merge.plan)
        wanted = [output for output in self.merge.plan.outputs if output.name in tensors]
        with torch.no_grad():
            execute(self.merge.only(wanted), ModuleSink(tensors))
        return module


@dataclass(frozen=True)
class ScoredVariant(Result):
    """A variant's values and its score on the largest budget it was given."""

    values: dict[str, Any]
    budget: int
    score: float


@dataclass(frozen=True)
class Sweep(Shown, Result):
    """Trials from best to worst; `recipe` is the best one's, `unseen` its score on questions that the sweep did not
    use.
    """

    trials: tuple[ScoredVariant, ...]
    recipe: dict[str, Any]
    search: ScaleSearch
    unseen: float | None = None


@dataclass(frozen=True, eq=False)
class TaskScore:
    """The mean over tasks of a module's score on `budget` questions of each, or all it has (negated for perplexity).

    Questions are drawn at random; a fifth of them is held out for the score of the best variant (`held_out`).
    """

    module: nn.Module
    tasks: Sequence[Task]
    tokenizer: str

    def __call__(self, variant: Variant, budget: int) -> float:
        return mean_score(self.answers(variant, budget))

    def answers(self, variant: Variant, budget: int) -> list[list[float]]:
        """Return for each task the score of every question, higher for better answers."""
        return self._answers(variant, lambda count: slice(min(budget, count - count // 5)))

    def limit(self, budgets: Sequence[int]) -> list[int]:
        """Return the budgets, none above the questions of the largest task; those that become equal are one."""
        counts = [task.count(self.tokenizer) for task in self.tasks]
        most = max(count - count // 5 for count in counts)
        return list(dict.fromkeys(min(budget, most) for budget in budgets))

    def held_out(self, variant: Variant) -> float | None:
        """Return the score on the held-out questions; None if a task has too few."""
        if any(task.count(self.tokenizer) < 5 for task in self.tasks):
            return None
        return mean_score(self._answers(variant, lambda count: slice(count - count // 5, None)))

    def _answers(self, variant: Variant, part: Callable[[int], slice]) -> list[list[float]]:
        model = variant.into(self.module).eval()
        return [
            [
                value if task.higher_is_better else -value
                for value in task.answers(model, self.tokenizer, part(task.count(self.tokenizer)))
            ]
            for task in self.tasks
        ]


def mean_score(answers: Sequence[Sequence[float]]) -> float:
    """Return the mean over tasks of the mean score of their questions."""
    return sum(sum(values) / len(values) for values in answers) / len(answers)


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse `["density=0.1,0.2", "method=ties,dare_ties"]` into names and values."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.strip() or not values.strip():
            raise InputError(f"{text!r}: expected parameter=value,value,…, e.g. density=0.1,0.2")
        (found[name.strip()],) = documents.parse(f"[{values}]", text)
    return found


def variants(recipe: str | os.PathLike[str] | Mapping[str, Any], over: Over) -> list[Variant]:
    """Return every combination of the values, planned.

    Parameters that a method lacks are left out of its recipes, and equal recipes are merged into one.

    Args:
        recipe: A recipe: a file or a document.
        over: The values of each parameter, of `method` or of `seed`.

    Raises:
        InputError: If there are no values, or no method of the sweep has a parameter.
    """
    if not over or not all(over.values()):
        raise InputError("nothing to sweep over; expected at least one value of one parameter")
    document, root = _read(recipe)
    opened = functools.cache(open_checkpoint)  # variants share their models
    found: dict[str, Variant] = {}
    for values in itertools.product(*over.values()):
        chosen = dict(zip(over, values, strict=True))
        kept, varied = _vary(document, chosen, "method" in over)
        key = json.dumps(varied, sort_keys=True, default=str)
        if key not in found:
            found[key] = Variant(kept, varied, recipes.prepare(recipes.load(varied, root), opened))
    unknown = [name for name in over if all(name not in variant.values for variant in found.values())]
    if unknown:
        known = {name for each in found.values() for name in acting_parameters(each.document, _method(each.document))}
        raise InputError(f"no method of this sweep has a parameter {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return list(found.values())


def sweep(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    over: Over,
    score: VariantScore,
    *,
    budgets: Sequence[int] = (1,),
    keep: float = 0.5,
    journal: str | os.PathLike[str] | None = None,
    scored_by: str = "",
    on_score: Callable[[Variant, int, float], None] = lambda variant, budget, score: None,
) -> Sweep:
    """Score the variants of a recipe; higher is better.

    Args:
        recipe: A recipe: a file or a document.
        over: The values of each parameter, of `method` or of `seed`.
        score: A function of a variant and a budget, which merges by `variant.weights()` or `variant.into(module)`.
        budgets: One budget is a grid; several are successive halving: all variants on the first, the best on the next.
        keep: The share of variants that reach the next budget.
        journal: A file for the scores; repeat the call to continue an interrupted sweep.
        scored_by: Names the score in the journal, so that scores of another kind are not reused.
        on_score: Called with every variant, its budget and its score.

    Returns:
        The variants from best to worst, and the recipe of the best.

    Raises:
        InputError: If the recipe cannot be varied like this, or the journal is of another sweep.
    """
    listed = {variant.label: variant for variant in variants(recipe, over)}
    place = None if journal is None else Path(journal)
    if place is not None and isinstance(recipe, (str, os.PathLike)) and _is_same_file(place, Path(recipe)):
        raise InputError(f"{place}: is the recipe itself; choose another file for the scores")
    files = SourceFiles(f for variant in listed.values() for source in variant.merge.sources for f in source.files())

    def scored(label: str, budget: int) -> float:
        variant = listed[label]
        key = f"{variant.fingerprint()} {budget}"
        if key not in known.scores:
            answers = score.answers(variant, budget) if isinstance(score, TaskScore) else None
            value = float(score(variant, budget)) if answers is None else mean_score(answers)
            files.check()
            known.add(key, variant.values, variant.label, budget, value, answers)
        on_score(variant, budget, known.scores[key])
        return known.scores[key]

    budgets = score.limit(budgets) if isinstance(score, TaskScore) else budgets
    with ScoreJournal(place, scored_by) as known:
        search = successive_halving(list(listed), scored, budgets=budgets, keep=keep)
    last = {label: (rung.budget, value) for rung in search.rungs for label, value in rung.scores.items()}
    ordered = sorted(last, key=lambda label: (-last[label][0], last[label][1] != last[label][1], -last[label][1]))
    trials = tuple(ScoredVariant(dict(listed[label].values), *last[label]) for label in ordered)
    unseen = score.held_out(listed[search.best]) if isinstance(score, TaskScore) else None
    return Sweep(trials, dict(listed[search.best].document), search, unseen)


def _is_same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _read(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], Path | None]:
    if isinstance(recipe, Mapping):
        return dict(recipe), None
    path = Path(recipe)
    return documents.read_single(path, "one recipe to vary")[0], path.parent


def _method(document: Mapping[str, Any]) -> str:
    name = document.get(method_key(document))
    if not isinstance(name, str):
        raise InputError("the recipe has no method whose parameters could be varied")
    return name


def _vary(
    document: Mapping[str, Any], values: Mapping[str, Any], methods: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that this recipe uses, and the recipe with them."""
    varied = dict(document)
    if "method" in values:
        varied[method_key(document)] = values["method"]
    known = acting_parameters(document, _method(varied))
    own = dict(varied.get("parameters") or {})
    if methods:
        own = {name: value for name, value in own.items() if name in known}
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name == "method":
            kept[name] = value
        elif name == "seed":
            kept[name] = varied[name] = value
        elif name in known:
            _refuse_own(document, name)
            kept[name] = own[name] = value
    if own or "parameters" in varied:
        varied["parameters"] = own
    return kept, varied


def _refuse_own(document: Mapping[str, Any], name: str) -> None:
    for i, model in enumerate(document.get("models") or ()):
        if isinstance(model, dict) and (name in model or name in (model.get("parameters") or {})):
            raise InputError(f"models[{i}] sets its own {name!r}, which a sweep cannot vary; remove it there")
