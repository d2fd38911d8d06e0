"""Turn a recipe into a plan from headers alone, and find every problem before any weight is read."""

from __future__ import annotations

import functools
from dataclasses import replace

from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.vocabulary import Remapped
from merganser.engine.merge import Merge, Open
from merganser.engine.plan import Output, Plan
from merganser.recipes import config_differences
from merganser.recipes.notes import (
    note_averaged_kernels,
    note_parametrised,
    note_shared_gradients,
    note_unmatched_patterns,
    note_unused_models,
)
from merganser.recipes.outputs import OutputPlanner
from merganser.recipes.quantisation import quantise
from merganser.recipes.schema import Problems, Recipe
from merganser.recipes.sidecar_plan import plan_sidecars
from merganser.recipes.sources import SourceTable
from merganser.recipes.vocabularies import note_renumbered, unify


def plan(recipe: Recipe, open: Open = open_checkpoint) -> Plan:
    """Return the plan of a recipe: everything a merge will do, computed from the headers of its models.

    Args:
        recipe: What to merge.
        open: Turns a reference into a checkpoint. Every model is opened once.

    Returns:
        The plan.

    Raises:
        InputError: If the recipe and the models do not fit together; the message lists every problem.

    Example:
        >>> plan = mg.recipes.plan(mg.recipes.load("recipe.yml"))
        >>> plan.notes
        ()
    """
    return prepare(recipe, open).plan


def prepare(recipe: Recipe, open: Open = open_checkpoint) -> Merge:
    """Resolve a recipe against the headers of its models.

    Linear in the number of tensors. The output has the tensors of the base, or of the first model without a base.

    Args:
        recipe: What to merge.
        open: Turns a reference into a checkpoint. Every model is opened once.

    Returns:
        The merge: its plan, the open models, and the rules that were built to check the parameters.

    Raises:
        InputError: If the recipe and the models do not fit together; the message lists every problem.

    Example:
        >>> merge = mg.recipes.prepare(mg.recipes.load("recipe.yml"))
        >>> merge.plan.bytes_out
        1936
    """
    return quantise(_prepare(recipe, functools.cache(open)), recipe.output.quantize)


def _prepare(recipe: Recipe, open: Open) -> Merge:
    table = SourceTable(recipe, open, lambda inner: _prepare(inner, open))
    problems = Problems()
    with problems.collect():
        relaid = table.adopt_layout()
        relaid += table.match_experts() if recipe.match_experts else []
    problems.finish()
    vocabulary = None
    with problems.collect():
        vocabulary = unify(recipe, table)
    if vocabulary is not None:
        plain = list(table.checkpoints)
        for i, seen in enumerate(vocabulary.maps):
            if seen is not None:
                table.models[i] = replace(table.models[i], vocabulary=seen)
                table.checkpoints[i] = Remapped(plain[i], seen, plain)
    planner = OutputPlanner(recipe, table)
    outputs: list[Output] = []
    with problems.collect():
        outputs = planner.outputs(unified=not problems)
    problems.finish()
    sidecars, remarks = plan_sidecars(planner, vocabulary, outputs)
    remarks = [*config_differences.note_differences(table, bool(planner.stacking.restacked)), *remarks]
    nested = [f"{model.label}: {note}" for model in table.models if model.plan for note in model.plan.notes]
    known = {name for checkpoint in table.checkpoints for name in checkpoint}
    unmatched = note_unmatched_patterns(recipe, planner.names(), {s.name for o in outputs for s in o.inputs}, known)
    rows = vocabulary.notes if vocabulary is not None else note_renumbered(recipe, table)
    rules = planner.rules(outputs)
    lists = note_shared_gradients(recipe, {type(rule) for rule in rules.values()})
    notes = [*nested, *relaid, *recipe.notes, *planner.notes, *unmatched, *lists, *rows, *remarks]
    notes += [*note_averaged_kernels(outputs, rules), *note_parametrised(outputs)]
    result = Plan(
        models=(*table.models, *table.sides),
        outputs=tuple(outputs),
        aliases=planner.aliases(outputs),
        seed=recipe.seed,
        shard_size=recipe.output.shard_size,
        sidecars=sidecars,
        notes=tuple(dict.fromkeys([*notes, *note_unused_models(table, outputs)])),
    )
    return Merge(result, (*table.checkpoints, *table.side_checkpoints), rules)
