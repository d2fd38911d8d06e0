"""Find the method and its parameters for a tensor, given its name, depth and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from merganser.errors import RecipeError
from merganser.methods.base import Method
from merganser.methods.registry import lookup, parameters
from merganser.recipes.schema import Entry, Override, Part, Recipe, Slice
from merganser.recipes.settings import Choice, Gradient, Setting, evaluate, matches

#: A parameter of this name is the depth of the tensor, unless the recipe sets it.
_DEPTH = "depth"


#: What the parameters of tensors depend on: nothing (all tensors share them), the depth, or also the name.
Dependence = Literal["nothing", "depth", "name"]


def find_override(recipe: Recipe, name: str) -> Override | None:
    """Return the first override with a matching glob."""
    for override in recipe.overrides:
        if any(matches(glob, name) for glob in override.match):
            return override
    return None


@dataclass(frozen=True)
class Scope:
    """What a recipe says about some tensors: in their part, in their slice, and in the override for their names."""

    recipe: Recipe
    part: Part
    each: Slice
    override: Override | None

    def method(self) -> type[Method]:
        """Return the override's method, or else the recipe's; an override that only names a model copies tensors."""
        override = self.override
        if override is None:
            return lookup(self.recipe.method)
        copied = override.model is not None and not override.parameters
        return lookup(override.method or ("passthrough" if copied else self.recipe.method))

    def settings(self, entry: Entry | None) -> list[Mapping[str, Setting]]:
        """Return where a parameter is looked up, nearest first: override, model, slice, module, recipe."""
        around = (self.override, entry, self.each, self.part, self.recipe)
        return [place.parameters for place in around if place is not None]


def resolve(chain: Sequence[Setting], name: str, t: float) -> Any:
    """Return the first value in the chain for this tensor at this depth, or None."""
    for setting in chain:
        value = evaluate(setting, name, t)
        if value is not None:
            return value
    return None


@dataclass(frozen=True)
class Resolver:
    """Resolves the parameters of `method` for the tensors of one slice under one override, from name and depth alone.

    Per-model filters see the name in the source if `filter_by_source`, else in the output.
    """

    method: type[Method]
    shared: Mapping[str, tuple[Setting, ...]]
    own: Mapping[str, tuple[tuple[Setting, ...], ...]]
    labels: tuple[str, ...]
    filter_by_source: bool
    required: tuple[str, ...] = ()

    @classmethod
    def of(cls, scope: Scope, method: type[Method], entries: Sequence[Entry]) -> Resolver:
        # A copy has its own scale: the recipe's scale applies to task vectors.
        alone = scope.override is not None and method.name == "passthrough" != scope.recipe.method

        def chain(key: str, entry: Entry | None) -> tuple[Setting, ...]:
            found = scope.settings(entry)
            return tuple(settings[key] for settings in (found[:1] if alone else found) if key in settings)

        known, conventions = parameters(method), scope.recipe.conventions
        return cls(
            method,
            {key: chain(key, None) for key, p in known.items() if not p.per_model},
            {key: tuple(chain(key, entry) for entry in entries) for key, p in known.items() if p.per_model},
            tuple(entry.label for entry in entries),
            conventions.filter_by_source,
            tuple(key for key in conventions.required if key in known),
        )

    def find_unset(self) -> dict[str, list[str]]:
        """Return the required parameters that the recipe does not set, each with the models that lack it."""
        found = {
            key: [label for label, chain in zip(self.labels, self.own[key], strict=True) if not chain]
            for key in self.required
        }
        return {key: labels for key, labels in found.items() if labels}

    @cached_property
    def reach(self) -> Dependence:
        chains = [*self.shared.values(), *(chain for each in self.own.values() for chain in each)]
        kinds = {type(setting) for chain in chains for setting in chain}
        if Choice in kinds:
            return "name"
        return "depth" if Gradient in kinds or _DEPTH in self.shared else "nothing"

    def at(self, name: str, sources: Sequence[str], t: float) -> dict[str, Any]:
        """Return the parameters for the output tensor `name`, made of `sources`, at depth `t`.

        Parameters the recipe does not set keep the method's defaults, except that `depth` is filled in.
        """
        found = {key: value for key, chain in self.shared.items() if (value := resolve(chain, name, t)) is not None}
        if _DEPTH in self.shared:
            found.setdefault(_DEPTH, t)
        for key, chains in self.own.items():
            values = [
                resolve(chain, source if self.filter_by_source else name, t)
                for chain, source in zip(chains, sources, strict=True)
            ]
            for chain, value, label in zip(chains, values, self.labels, strict=True):
                if key in self.required and chain and value is None:
                    raise RecipeError(
                        f"{key} of {label} has no value: none of its filters matches; end its list with {{value: …}}"
                    )
            if any(value is not None for value in values):
                found[key] = [self._use_default(key, value, i) for i, value in enumerate(values)]
        return found

    def _use_default(self, key: str, value: Any, model: int) -> Any:
        parameter = parameters(self.method)[key]
        if value is None and parameter.required:
            raise RecipeError(
                f"method {self.method.name!r} needs the parameter {key!r} for {self.labels[model]} ({parameter.help})"
            )
        return parameter.default if value is None else value
