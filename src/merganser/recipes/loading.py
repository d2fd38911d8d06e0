"""Load a recipe of either dialect from a file, a text or a mapping."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from merganser.errors import RecipeError, reading
from merganser.methods.registry import aliases, lookup, parameters
from merganser.recipes import documents, expressions, mergekit, native
from merganser.recipes.mergekit import Translation
from merganser.recipes.mergekit_parameters import list_acting
from merganser.recipes.other_tools import refuse_other_tools
from merganser.recipes.schema import Recipe, Written

_HINT = "; a recipe is YAML"


@dataclass(frozen=True)
class _Around:
    """What surrounds a document.

    Attributes:
        root: The directory of its file.
        parents: The files that it is nested in, and its own.
        held: Names of models that are in memory.
        stages: The documents before it, by name.
        read: The recipes of these, by the identity of their documents.
    """

    root: Path | None
    parents: tuple[Path, ...] = ()
    held: Collection[str] = ()
    stages: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[int, Recipe] = field(default_factory=dict)


def load(
    source: str | os.PathLike[str] | Mapping[str, Any], root: Path | None = None, held: Collection[str] = ()
) -> Recipe:
    """Read a recipe, native or mergekit's.

    A recipe with `merge_method` is in mergekit's dialect; one with `method` or an `expression` is native.
    Several YAML documents are stages: all but the last one have a `name` by which later ones refer to them. Relative
    paths are looked up beside the recipe first, then in the working directory.

    Args:
        source: The path of a YAML file (`-` is standard input), YAML text, or a mapping.
        root: The directory that relative paths refer to, if the source is not a file.
        held: Names of models that are in memory, if the source is a mapping.

    Returns:
        The recipe.

    Raises:
        RecipeError: If the recipe is invalid; the message lists every problem.

    Example:
        >>> recipe = mg.recipes.load("recipe.yml")
        >>> recipe.method
        'ties'
    """
    if isinstance(source, Mapping):
        given = to_yaml_values(source)
        return _read_document(given, given, "recipe", _Around(root, held=held))
    text = os.fspath(source)
    if text == "-":
        with reading("standard input", RecipeError, _HINT):
            text = sys.stdin.buffer.read().decode("utf-8")
        return _load(documents.parse(text, "standard input"), text, "standard input", _Around(root))
    if "\n" in text or (": " in text and not Path(text).exists()):
        return _load(documents.parse(text), text, "recipe", _Around(root))
    return _load_file(Path(text), ())


def resolve_document(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as a native document with the options it was run with and the recipes it names inlined.

    Example:
        >>> resolve_document(load("merge_method: linear\\nmodels: [{model: a}, {model: b}]"))["seed"]
        0
    """
    inner = {entry.label: entry.recipe for entry in recipe.entries() if entry.recipe is not None}
    document: dict[str, Any] = _inline(
        recipe.document, {label: each for label, each in inner.items() if each.root == recipe.root}
    )
    output = document.get("output") or {}
    if recipe.output.dtype is not None:
        output = {**output, "dtype": recipe.output.dtype}
    if recipe.output.quantize is not None:
        output = {**output, "quantize": recipe.output.quantize}
    return document | {"seed": recipe.seed, "output": {**output, "shard_size": recipe.output.shard_size}}


def _inline(value: Any, recipes: Mapping[str, Recipe]) -> Any:
    """Replace the names of recipe files by the recipes."""
    if isinstance(value, list):
        return [_inline(each, recipes) for each in value]
    if isinstance(value, dict):
        file = value.get("recipe", value.get("path"))
        if isinstance(file, str) and file in recipes:
            rest = {key: each for key, each in value.items() if key not in ("recipe", "path")}
            return {"recipe": resolve_document(recipes[file]), "label": file} | rest
        return {key: _inline(each, recipes) for key, each in value.items()}
    if isinstance(value, str) and value in recipes:
        return {"recipe": resolve_document(recipes[value]), "label": value}
    return value


def _load_file(path: Path, parents: tuple[Path, ...]) -> Recipe:
    if not path.exists() or path.is_dir():
        kind = "is a directory, not a recipe" if path.is_dir() else "no such recipe file"
        raise RecipeError(f"{path}: {kind}")
    resolved = path.resolve()
    if resolved in parents:
        raise RecipeError(f"{path}: the recipe contains itself")
    root = path.parent if path.is_file() else None  # a pipe has no directory
    with reading(path, RecipeError, _HINT):
        text = path.read_text(encoding="utf-8")
    return _load(documents.parse(text, str(path)), text, str(path), _Around(root, (*parents, resolved)))


def _load(found: list[Any], written: Written, source: str, around: _Around) -> Recipe:
    found = [document for document in found if document is not None]
    if not found:
        raise RecipeError(f"{source}: the recipe is empty")
    if len(found) == 1:
        return _read_document(found[0], written, source, around)
    numbered = list(enumerate(found, 1))
    names = _name_stages(numbered, source)
    # The merge without a name is the result; if all have one, the last is.
    final = next((position for position, _ in numbered if position not in names), len(found))
    result: Recipe | None = None
    stages: dict[str, Any] = {}
    read: dict[int, Recipe] = {}
    around = replace(around, stages=stages, read=read)
    for position, document in _sort_stages(numbered, names, source):
        recipe = _read_document(document, written, f"{source}, document {position}", around)
        read[id(document)] = recipe
        if position in names:
            stages[names[position]] = document
        if position == final:
            result = recipe
    assert result is not None
    used = _find_needed(numbered, names, final)
    unused = [f"stage {name!r} is not used" for position, name in names.items() if position not in used]
    return replace(result, notes=(*result.notes, *unused))


def _name_stages(numbered: list[tuple[int, Any]], source: str) -> dict[int, str]:
    """Return the names of stages by the position of their document."""
    found: dict[int, str] = {}
    for position, document in numbered:
        name = document.get("name") if isinstance(document, dict) else None
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise RecipeError(f"{source}, document {position}: name: expected text, got {name!r}")
        if name in found.values():
            raise RecipeError(f"{source}, document {position}: two stages are called {name!r}")
        found[position] = name
    unnamed = [position for position, document in numbered if isinstance(document, dict) and position not in found]
    if len(unnamed) > 1:
        raise RecipeError(f"{source}: only the final merge may lack a name; documents {unnamed} do")
    return found


def _find_needed(numbered: list[tuple[int, Any]], names: Mapping[int, str], final: int) -> set[int]:
    """Return the positions of the documents that the final one uses, including itself."""
    documents_at, places = dict(numbered), {name: position for position, name in names.items()}
    needed, waiting = {final}, [final]
    while waiting:
        for name in _collect_texts(documents_at[waiting.pop()]) & places.keys():
            if places[name] not in needed:
                needed.add(places[name])
                waiting.append(places[name])
    return needed


def _sort_stages(waiting: list[tuple[int, Any]], names: Mapping[int, str], source: str) -> list[tuple[int, Any]]:
    """Return the stages in an order in which each comes before those that use it."""
    ordered: list[tuple[int, Any]] = []
    known, done = set(names.values()), set[str]()
    while waiting:
        ready = [(p, d) for p, d in waiting if not ((_collect_texts(d) & known) - done)]
        if not ready:
            stuck = sorted(names.get(p, str(p)) for p, _ in waiting)
            raise RecipeError(f"{source}: the stages {', '.join(stuck)} depend on each other")
        ordered += ready
        done |= {names[p] for p, _ in ready if p in names}
        waiting = [each for each in waiting if each not in ready]
    return ordered


def _collect_texts(value: Any) -> set[str]:
    """Return every text in a document except its own name."""
    if isinstance(value, dict):
        return {text for key, each in value.items() if key != "name" for text in _collect_texts(each)}
    if isinstance(value, list):
        return {text for each in value for text in _collect_texts(each)}
    return {value} if isinstance(value, str) else set()


def translate(data: Mapping[str, Any], stages: Mapping[str, Any], source: str = "recipe") -> Translation:
    """Return a document of any dialect as a native one; recipes inside it stay as they are."""
    if mergekit.recognises(data):
        return mergekit.translate(data, stages)
    if expressions.recognises(data):
        document, notes = expressions.expand(data, source)
        return Translation(document, notes=list(notes))
    return Translation(dict(data))


def method_key(document: Mapping[str, Any]) -> str:
    """Return the key that names the method in the dialect of a document."""
    return "merge_method" if mergekit.recognises(document) else "method"


def acting_parameters(document: Mapping[str, Any], called: str) -> set[str]:
    """Return the parameters of a method that have an effect in a document, as its dialect spells them."""
    method = lookup(called)
    return {
        *(list_acting(called, method) if mergekit.recognises(document) else {**parameters(method), **aliases(method)})
    }


def _read_document(data: Any, written: Written, source: str, around: _Around) -> Recipe:
    """Return the recipe in a document."""
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe is a mapping with a method and models, got {type(data).__name__}")

    inside: dict[int, Recipe] = {}

    def nested(inner: Any, where: str) -> Recipe:
        if isinstance(inner, str):
            beside = (around.root or Path()) / os.path.expanduser(inner)
            return _load_file(beside if beside.exists() else Path(inner), around.parents)
        if not isinstance(inner, dict):
            raise RecipeError(f"{where}: expected a recipe or the path of one")
        inside[id(inner)] = around.read.get(id(inner)) or _read_document(inner, inner, where, around)
        return inside[id(inner)]

    try:
        refuse_other_tools(data)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None
    if "merge_method" in data and "method" in data:
        raise RecipeError(f"{source}: has method and merge_method; a recipe is in one dialect")
    translation = translate(data, around.stages, source)
    recipe = native.read(translation, nested, around.root, written, source, around.held)
    return replace(recipe, document=_make_native(translation.document, inside))


def _make_native(value: Any, recipes: Mapping[int, Recipe]) -> Any:
    """Return a copy of a document with native documents in place of `recipes`, which are given by identity."""
    value = recipes[id(value)].document if id(value) in recipes else value
    if isinstance(value, list):
        return [_make_native(each, recipes) for each in value]
    return {key: _make_native(each, recipes) for key, each in value.items()} if isinstance(value, dict) else value


def to_yaml_values(value: Any) -> Any:
    """Return the value as YAML would load it: paths as text, tuples and arrays as lists, their scalars as numbers."""
    if isinstance(value, Mapping):
        return {str(key): to_yaml_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_yaml_values(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enumeration member would be its name
    return value.tolist() if hasattr(value, "tolist") else value
