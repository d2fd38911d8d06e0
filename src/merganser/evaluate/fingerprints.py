"""Hashes of what decides the answers to a task, part by part: its questions, how they are asked, tokenizer, own code.

A study stores them and refuses to continue if one has changed; stored answers have them in their keys.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from merganser.evaluate.examiners import Function
from merganser.evaluate.harness import Harness
from merganser.evaluate.loaders import Loader
from merganser.evaluate.model_files import hash_settings
from merganser.evaluate.questions import Asked, Examiner
from merganser.evaluate.references import import_function

#: Incremented if a later version would answer the same question differently.
FORMAT = "1"
#: Fields of examiners that do not affect answers by themselves: places of questions and examples, which are hashed as
#: they are read, and the size of batches.
_INERT = ("source", "test", "examples", "data", "include", "tokenizer", "batch")


def hash_examiner(examiner: Examiner) -> dict[str, str]:
    """Return a hash of every part of a task that decides answers.

    Args:
        examiner: The task.

    Returns:
        Hashes by name: the examiner's settings (`prompt`, `stop`, …), `examples` and `data`; for functions the
        files of their code, by path.

    Example:
        >>> sorted(hash_examiner(Classification("texts.tsv", "./base")))  # doctest: +SKIP
        ['data', 'examples', 'fields', 'kind', 'max_length']
    """
    if isinstance(examiner, Function):
        return hash_source(examiner.reference)
    if isinstance(examiner, Harness):
        asked = [(question.document, [r.arguments for r in question.requests]) for question in examiner.questions]
        version = importlib.metadata.version("lm_eval")
        return {**hash_asking(examiner), "lm-eval": hash_value(version), "data": hash_value(asked)}
    if isinstance(examiner, Asked):
        return {**hash_asking(examiner), "data": hash_value(list(map(_strip_place, examiner.records)))}
    return {}


def hash_asking(examiner: Asked | Harness) -> dict[str, str]:
    """Return a hash of everything but the questions and the tokenizer: how an examiner asks."""
    how: dict[str, Any] = {each.name: getattr(examiner, each.name) for each in fields(examiner)}
    how = {name: value for name, value in how.items() if name not in _INERT} | {"kind": type(examiner).__name__}
    return {name: hash_value(value) for name, value in how.items()} | {
        "examples": hash_value(getattr(examiner, "solved", ()))
    }


def hash_question(examiner: Asked, item: int) -> str:
    """Return the hash of a question, which does not depend on its place in a file."""
    return hash_value(_strip_place(examiner.records[item]))


def hash_tokenizer(tokenizer: str) -> str:
    """Return a hash of all files of a tokenizer; those of copies have the same."""
    return hash_value(sorted((Path(name).name, digest) for name, digest in hash_settings(tokenizer).items()))


def hash_module(loader: Loader) -> dict[str, str]:
    """Return a hash of every file that decides what a loader builds, besides weights: settings, or its own code."""
    return hash_source(loader.kind) if ":" in loader.kind else hash_settings(loader.path)


def hash_source(reference: str) -> dict[str, str]:
    """Return a hash of the file of a function `package.module:name`, and of the files beside it that it imports.

    Modules of installed packages are not followed.
    """
    import_function(reference)
    name = reference.partition(":")[0]
    origin = getattr(sys.modules[name], "__file__", None)
    if origin is None:
        return {}
    file = Path(origin)
    root = file.parents[name.count(".") + (file.name == "__init__.py")]
    installed = root.name in ("site-packages", "dist-packages")
    found = {file} if installed else {file, *_find_own_files(root, name)}
    return {str(each): hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(found)}


def _find_own_files(root: Path, name: str) -> set[Path]:
    """Return the files below `root` of a module and of everything that it imports from there."""
    found: set[Path] = set()
    waiting = [name]
    while waiting:
        parts = waiting.pop().split(".")
        place = root.joinpath(*parts)
        file = next((each for each in (place / "__init__.py", place.with_suffix(".py")) if each.is_file()), None)
        if file is None or file in found:
            continue
        found.add(file)
        package = ".".join(parts if file.name == "__init__.py" else parts[:-1])
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                waiting += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = resolve_name("." * node.level + (node.module or ""), package)
                waiting += [start, *(f"{start}.{each.name}" for each in node.names)]
    return found


def hash_value(value: Any) -> str:
    """Return the hash of JSON-like values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _strip_place(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "place"}
