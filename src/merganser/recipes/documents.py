"""YAML for recipes: safe loading that rejects duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from merganser.errors import RecipeError, first_line, reading
from merganser.excerpts import shorten

#: Limit on the values of a document, also after aliases are expanded.
_MOST_VALUES = 100_000
_DEEPEST = 100
_LARGEST = 2**63


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > _DEEPEST:
            raise _too_deep(self.line)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        _bound(node)
        return super().construct_document(node)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text of a scalar, with JSON's surrogate pairs joined into one character."""
        found = super().construct_scalar(node)
        try:
            return found.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            line = node.start_mark.line + 1
            raise RecipeError(
                f"line {line}: a text contains half of a surrogate pair: {shorten(ascii(found), 24, 'start')}"
            ) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        line = node.start_mark.line + 1
        try:
            found = super().construct_yaml_int(node)
        except ValueError:
            raise RecipeError(
                f"line {line}: not a whole number, or one too large: {shorten(node.value, 24, 'start')}"
            ) from None
        if abs(found) >= _LARGEST:
            raise RecipeError(f"line {line}: the number {shorten(node.value, 24, 'start')} is too large")
        return found

    def construct_yaml_timestamp(self, node: yaml.ScalarNode) -> Any:
        """Return a date as the text that was written: recipes have paths and names, but no dates."""
        return self.construct_scalar(node)


def _too_deep(line: int) -> RecipeError:
    return RecipeError(f"line {line + 1}: nested more than {_DEEPEST} deep")


def _too_long() -> RecipeError:
    return RecipeError(
        f"more than {_MOST_VALUES:,} values; split it into nested recipes, or use a glob over checkpoints"
    )


def _bound(document: yaml.Node) -> None:
    """Refuse aliases that expand to far more than was written, contain themselves, or nest too deeply."""
    #: Number of values in a node and their nesting depth; None while it is being measured.
    found: dict[yaml.Node, tuple[int, int] | None] = {}

    def measure(node: yaml.Node) -> tuple[int, int]:
        if node not in found:
            found[node] = None
            inner = [measure(each) for each in _list_children(node)]
            values, depth = 1 + sum(v for v, _ in inner), 1 + max((d for _, d in inner), default=0)
            if depth > _DEEPEST:
                raise _too_deep(node.start_mark.line)
            found[node] = values, depth
        measured = found[node]
        if measured is None:
            line = node.start_mark.line + 1
            raise RecipeError(f"line {line}: an alias refers to a value that contains it")
        return measured

    values, _ = measure(document)
    if len(found) > _MOST_VALUES:
        raise _too_long()
    if values > _MOST_VALUES:
        raise RecipeError(
            f"its aliases (*name) expand to more than {_MOST_VALUES:,} values; write the needed values out"
        )


def _list_children(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield the direct children of a node."""
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, Hashable):
            raise RecipeError(f"line {line}: a mapping key must be plain text")
        if key in seen:
            raise RecipeError(f"line {line}: {key!r} is given twice (first at line {seen[key]})")
        seen[key] = line
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


# YAML 1.1 reads `1e-5` as text; everyone who writes it means a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_timestamp)


def parse(text: str, source: str = "recipe") -> list[Any]:
    """Parse the documents of a YAML text; errors name the line."""
    try:
        if text.count("\n") + text.count(",") > 2 * _MOST_VALUES:  # not worth parsing
            raise _too_long()
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(f"{source}: not valid YAML: {where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not valid YAML: {first_line(error)}") from None
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None
    except (ValueError, KeyError) as error:  # raised for an explicit tag such as !!float x
        raise RecipeError(f"{source}: not valid YAML: {error}") from None


def read_single(path: Path, what: str) -> tuple[dict[str, Any], str]:
    """Return the only document of a file, a mapping, and the text of the file; `what` names the content in messages."""
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe file")
    with reading(path, RecipeError, "; a recipe is YAML"):
        text = path.read_text(encoding="utf-8")
    found = [document for document in parse(text, str(path)) if document is not None]
    if len(found) != 1 or not isinstance(found[0], dict):
        raise RecipeError(f"{path}: expected {what}, a single mapping")
    return found[0], text
