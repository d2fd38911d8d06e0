"""YAML as recipes use it: safe, and without the silent loss of duplicate keys."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from merganser.errors import RecipeError


class _Loader(yaml.SafeLoader):
    pass


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
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


# YAML 1.1 takes `1e-5` for text; everyone who writes it means a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+$"), list("-+0123456789")
)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse(text: str, source: str = "recipe") -> list[Any]:
    """The documents of a YAML text; errors name the line."""
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise RecipeError(f"{source}: not valid YAML: {where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from None


def dump(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
