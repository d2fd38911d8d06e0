"""Notes on what the author of a recipe may not have intended."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from glob import has_magic

from merganser.engine.merge import RuleKey, rule_key
from merganser.engine.plan import Output
from merganser.errors import RecipeError
from merganser.methods.base import Method
from merganser.methods.registry import parameters
from merganser.recipes.resolve import find_override
from merganser.recipes.schema import Recipe
from merganser.recipes.settings import Choice, Gradient, Setting, matches
from merganser.recipes.sources import SourceTable

#: Share of the merged entries below which averaged kernels are not noted (a ViT's patch embedding).
_SHARE = 0.1
#: What torch stores in place of a weight: new parametrisations, or the old weight norm, spectral norm and pruning.
_PARAMETRISED = re.compile(
    r"(?P<module>(.*\.)?)(parametrizations\.(?P<name>\w+)\..+|(?P<old>weight)(?P<part>_g|_orig))"
)


def note_averaged_kernels(outputs: Iterable[Output], rules: Mapping[RuleKey, Method]) -> list[str]:
    """Return a note if a method for matrices averages most of the weights because they are convolution kernels."""
    chosen = [(output, rules[key]) for output in outputs if not output.copies and (key := rule_key(output)) in rules]
    if all(rule.reach != "whole" for _, rule in chosen):
        return []
    from merganser.methods.matrices import MatrixRule

    merged = kernels = count = 0
    name = ""
    for output, rule in chosen:
        if not isinstance(rule, MatrixRule):
            continue
        merged += output.spec.numel
        if len(output.spec.shape) > 2 and not rule.convolutions:
            kernels, count, name = kernels + output.spec.numel, count + 1, rule.name
    if kernels <= _SHARE * merged:
        return []
    return [
        f"{name} averages {count} convolution kernels ({kernels / merged:.0%} of the merged entries): "
        "set `convolutions: true` to treat them as matrices"
    ]


def note_parametrised(outputs: Iterable[Output]) -> list[str]:
    """Return a note if weights are computed from others that are merged, as by torch's weight and spectral norm."""
    merged = {output.name for output in outputs if not output.copies}
    found = dict.fromkeys(
        f"{match['module']}{match['name'] or match['old']}"
        for name in sorted(merged)
        if (match := _PARAMETRISED.fullmatch(name)) and (match["part"] != "_g" or f"{name[:-1]}v" in merged)
    )
    if not found:
        return []
    return [
        f"{len(found)} weight(s) are parametrised, such as {next(iter(found))!r}: what they are computed from is "
        "merged, which is not the merge of the weights; for that, remove the parametrisation from the models first "
        "(torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm)"
    ]


def note_shared_gradients(recipe: Recipe, methods: Iterable[type[Method]]) -> Iterator[str]:
    """Yield notes on lists that were probably meant as one value for each model: as many values as there are models,
    in a place that all models share, of a parameter that every model may have for itself.
    """
    own = {name for method in methods for name, found in parameters(method).items() if found.per_model}
    counts = {len(each.models) for part in recipe.parts for each in part.slices}
    for where, shared in _walk_settings(recipe, entries=False):
        for name, setting in shared.items():
            if name in own and isinstance(setting, Gradient) and len(setting.values) in counts - {0, 1}:
                yield (
                    f"{where}: {name} is a gradient over depth, the same for all models; to give each model its own "
                    f"{name}, write it beside the model"
                )


def note_unmatched_patterns(
    recipe: Recipe, present: Collection[str], sources: Collection[str], known: Collection[str]
) -> Iterator[str]:
    """Yield notes on patterns that match no tensor, which are probably misspelt.

    Names without a wildcard that are all wrong were meant for something else, such as models: an error.

    Args:
        recipe: The recipe.
        present: The tensors of the output, including excluded ones.
        sources: Their names in the models.
        known: All tensors of the models.

    Raises:
        RecipeError: If a parameter has values by name, and no tensor has one of these names.
    """
    for glob in recipe.output.exclude:
        if not any(matches(glob, name) for name in (*present, *known)):
            yield f"exclude: {glob!r} matches no tensor"
    deciding = {id(find_override(recipe, name)) for name in present}
    for override in recipe.overrides:
        if id(override) not in deciding:
            globs = ", ".join(map(repr, override.match))
            yield f"{override.where}: {globs} matches no tensor that an earlier override does not"
    names = {*present, *sources}
    for where, settings in _walk_settings(recipe):
        for parameter, setting in settings.items():
            cases = setting.cases if isinstance(setting, Choice) else ()
            unmatched = [case.pattern for case in cases if case.pattern != "*" and not any(map(case.matches, names))]
            if len(unmatched) == len(cases) and not any(map(has_magic, unmatched)) and unmatched:
                raise RecipeError(
                    f"{where}: {parameter}: no tensor is called {' or '.join(map(repr, unmatched))}; expected globs "
                    "over tensor names, such as '*.mlp.*' (a value for one model stands beside its path)"
                )
            yield from (f"{where}: {parameter} for {pattern!r} matches no tensor" for pattern in unmatched)


def _walk_settings(recipe: Recipe, *, entries: bool = True) -> Iterator[tuple[str, Mapping[str, Setting]]]:
    """Yield the settings of a recipe, each with the name of its place; `entries` includes those beside models."""
    yield "parameters", recipe.parameters
    for override in recipe.overrides:
        yield override.where, override.parameters
    for part in recipe.parts:
        yield f"modules.{part.module}" if part.module else "parameters", part.parameters
        for each in part.slices:
            yield each.where, each.parameters
            if entries:
                yield from ((entry.where, entry.parameters) for entry in each.models)


def note_unused_models(table: SourceTable, outputs: Iterable[Output]) -> list[str]:
    """Return notes on models that no tensor comes from."""
    used = {source.model for output in outputs for source in output.reads}
    labels = [table.models[i].label for i in range(1, len(table)) if i not in used and i != table.donor]
    return [f"{label} is not needed: no tensor comes from it" for label in labels]
