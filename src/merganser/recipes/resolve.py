"""Find the method and its parameters for a tensor, given its name, depth and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from merganser.errors import RecipeError
from merganser.methods.base import Method
from merganser.methods.registry import lookup, parameters
from merganser.recipes.schema import Entry, Override, Part, Recipe, Slice
from merganser.recipes.settings import Choice, Gradient, Setting, evaluate, matches

#: A parameter of this name is the depth of the tensor, unless the recipe sets it.
_DEPTH = "depth"


Reach = Literal["nothing", "depth", "name"]


def override_for(recipe: Recipe, name: str) -> Override | None:
    """Return the first override with a matching glob."""
    for override in recipe.overrides:
        if any(matches(glob, name) for glob in override.match):
            return override
    return None


def method_for(recipe: Recipe, override: Override | None) -> type[Method]:
    """Return the override's method, or else the recipe's; an override that only names a model copies its tensors."""
    if override is None:
        return lookup(recipe.method)
    copied = override.model is not None and not override.parameters
    return lookup(override.method or ("passthrough" if copied else recipe.method))


def scopes(
    recipe: Recipe, part: Part, each: Slice, override: Override | None, entry: Entry | None
) -> list[Mapping[str, Setting]]:
    """Return the settings in which a parameter is looked up, nearest first: override, model, slice, module, recipe."""
    found = [each.parameters, part.parameters, recipe.parameters]
    if entry is not None:
        found.insert(0, entry.parameters)
    if override is not None:
        found.insert(0, override.parameters)
    return found


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
    def of(
        cls,
        recipe: Recipe,
        part: Part,
        each: Slice,
        override: Override | None,
        method: type[Method],
        entries: Sequence[Entry],
    ) -> Resolver:
        # A copy has its own scale: the recipe's scale applies to task vectors.
        alone = override is not None and method.name == "passthrough" != recipe.method

        def chain(key: str, entry: Entry | None) -> tuple[Setting, ...]:
            found = scopes(recipe, part, each, override, entry)
            return tuple(scope[key] for scope in (found[:1] if alone else found) if key in scope)

        known = parameters(method)
        return cls(
            method,
            {key: chain(key, None) for key, p in known.items() if not p.per_model},
            {key: tuple(chain(key, entry) for entry in entries) for key, p in known.items() if p.per_model},
            tuple(entry.label for entry in entries),
            recipe.conventions.filter_by_source,
            tuple(key for key in recipe.conventions.required if key in known),
        )

    def unsaid(self) -> dict[str, list[str]]:
        """Return the required parameters that the recipe does not set, each with the models that lack it."""
        found = {
            key: [label for label, chain in zip(self.labels, self.own[key], strict=True) if not chain]
            for key in self.required
        }
        return {key: labels for key, labels in found.items() if labels}

    @property
    def reach(self) -> Reach:
        """Return what parameters depend on: nothing (all tensors share them), the depth, or also the name."""
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
                found[key] = [self._or_default(key, value, i) for i, value in enumerate(values)]
        return found

    def _or_default(self, key: str, value: Any, model: int) -> Any:
        parameter = parameters(self.method)[key]
        if value is None and parameter.required:
            raise RecipeError(
                f"method {self.method.name!r} needs the parameter {key!r} for {self.labels[model]} ({parameter.help})"
            )
        return parameter.default if value is None else value
