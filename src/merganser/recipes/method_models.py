"""The models of a slice that a method merges, and their base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from merganser.errors import RecipeError
from merganser.methods.base import Method
from merganser.methods.registry import lookup, parameters
from merganser.recipes.resolve import Resolver, Scope
from merganser.recipes.schema import Entry, Override, Slice


@dataclass(frozen=True)
class Roles:
    """A method with the models it merges; `notes` reports what the user may not expect."""

    method: type[Method]
    inputs: tuple[Entry, ...]
    base: Entry | None
    resolver: Resolver
    notes: tuple[str, ...] = ()


def assign_roles(scope: Scope, same: Callable[[Entry, Entry], bool]) -> Roles:
    """Assign roles as mergekit does: a base among the models has no task vector, and a method without a base
    averages it with the other models, if it can.
    """
    recipe, each, override = scope.recipe, scope.each, scope.override
    method = scope.method()
    base = each.base or recipe.base
    where = override.where if override else each.where
    notes: list[str] = []
    entries = tuple(each.models)
    if override and (override.model is not None or method.name == "passthrough"):
        entries = (_find_override_model(each, override, base),)
        if method.base == "none":
            base = None
    others = tuple(entry for entry in entries if base is None or not same(entry, base))
    # The base's own entry in the slice gives its layers.
    base = next((entry for entry in each.models if base is not None and same(entry, base)), base)
    if method.base != "none":
        if base is not None and len(others) < len(entries) and not recipe.conventions.base_is_model:
            notes.append(f"{base.label} is the base, so {method.name!r} does not also count it as a model")
        entries = others
        if base is not None and not others:
            # The slice has only the base: there is nothing to merge.
            method, entries, base = lookup("passthrough"), (base,), None
        elif base is not None and base.layers is None and (layers := each.models[0].layers) is not None:
            like = f"layers [{layers[0]}, {layers[1]}) like {each.models[0].label}"
            notes.append(f"{each.where}: {base.label} is not among its models and contributes {like}")
    elif base is not None:
        listed = len(others) < len(entries)
        if listed and recipe.conventions.base_is_model:
            entries = (*(entry for entry in entries if same(entry, base)), *others)
        elif not listed and _counts_as_model(scope, method):
            entries = (base, *entries)
            notes.append(
                f"{base.label} is the base and counts as one of the models, because {method.name!r} has no base"
            )
        elif not listed and override is None and not (scope.part.sliced and method.name == "passthrough"):
            notes.append(f"{base.label} is only the template, because {method.name!r} has no base")
        base = None
    if again := next((entry for i, entry in enumerate(entries) if _is_repeated(entry, entries[:i], same)), None):
        notes.append(f"{again.label} is listed more than once and counts each time")
    method.check_inputs(len(entries), base is not None, f"{where}: method {method.name!r}")
    resolver = Resolver.of(scope, method, entries)
    for key, labels in resolver.find_unset().items():
        used = f"{parameters(method)[key].default:g} is used (mergekit would refuse)"
        notes.append(f"{each.where}: {key} is not given for {', '.join(labels)}; {used}")
    return Roles(method, entries, base, resolver, tuple(notes))


def _is_repeated(entry: Entry, earlier: Sequence[Entry], same: Callable[[Entry, Entry], bool]) -> bool:
    """Return whether an entry is an earlier one again: the same model, with the same layers."""
    return any(same(entry, other) and entry.layers == other.layers for other in earlier)


def _find_override_model(each: Slice, override: Override, base: Entry | None) -> Entry:
    """Return the model that an override names, or the base if it names none."""
    if override.model is None:
        if base is not None:
            return base
        if len(each.models) == 1:
            return each.models[0]
        raise RecipeError(f"{override.where}: name the model to pass through, under model")
    if override.model == "base" and base is not None:
        return base
    known = [*each.models, *([base] if base else [])]
    for entry in known:
        if entry.label == override.model:
            return entry
    labels = ", ".join(dict.fromkeys(entry.label for entry in known))
    raise RecipeError(f"{override.where}.model: {override.model!r} is not a model of this merge; known: {labels}")


def _counts_as_model(scope: Scope, method: type[Method]) -> bool:
    """Return whether an unlisted base takes part in a method without a base.

    If the base counts as a model it does, unless a parameter is given for every other model but not for it. Otherwise
    it only takes part to reach the number of models the method needs.
    """
    low, high = method.models
    recipe, part, each = scope.recipe, scope.part, scope.each
    if scope.override is not None or part.sliced or len(each.models) + 1 > high:
        return False
    if not recipe.conventions.base_is_model:
        return len(each.models) < low
    given = {name for entry in each.models for name in entry.parameters}
    shared = {**recipe.parameters, **part.parameters, **each.parameters}
    return not any(p.per_model and name in given and name not in shared for name, p in parameters(method).items())
