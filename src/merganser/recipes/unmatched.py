"""Notes on patterns of a recipe that match no tensor, which are probably misspelt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from merganser.recipes.resolve import override_for
from merganser.recipes.schema import Recipe
from merganser.recipes.settings import Choice, Setting, matches


def notes(recipe: Recipe, present: Collection[str], sources: Collection[str]) -> Iterator[str]:
    """Yield the notes. `present` are the output's tensors, also excluded ones; `sources` their names in the models."""
    for glob in recipe.output.exclude:
        if not any(matches(glob, name) for name in present):
            yield f"exclude: {glob!r} matches no tensor"
    deciding = {id(override_for(recipe, name)) for name in present}
    for override in recipe.overrides:
        if id(override) not in deciding:
            globs = ", ".join(map(repr, override.match))
            yield f"{override.where}: {globs} matches no tensor that an earlier override does not"
    names = {*present, *sources}
    for where, parameters in _scopes(recipe):
        for parameter, setting in parameters.items():
            for case in setting.cases if isinstance(setting, Choice) else ():
                if case.pattern != "*" and not any(map(case.matches, names)):
                    yield f"{where}: {parameter} for {case.pattern!r} matches no tensor"


def _scopes(recipe: Recipe) -> Iterator[tuple[str, Mapping[str, Setting]]]:
    """Yield the settings of a recipe, each with the name of its place."""
    yield "parameters", recipe.parameters
    for override in recipe.overrides:
        yield override.where, override.parameters
    for part in recipe.parts:
        yield f"modules.{part.module}" if part.module else "parameters", part.parameters
        for each in part.slices:
            yield each.where, each.parameters
            yield from ((entry.where, entry.parameters) for entry in each.models)
