"""Globs over checkpoints: `models: [./run/checkpoint-*]` means all of them, ordered by step number."""

from __future__ import annotations

import glob
import os.path
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merganser.checkpoints.kinds import TORCH_SUFFIXES
from merganser.checkpoints.references import exists
from merganser.checkpoints.tensor_names import natural_order
from merganser.errors import RecipeError
from merganser.recipes.references import describe_places

#: Key that excludes early checkpoints from a glob.
WINDOW = "window"
#: Suffixes of files that are checkpoints by themselves; any directory counts as one.
SUFFIXES = (".safetensors", ".gguf", *TORCH_SUFFIXES)


def expand(models: list[Any], root: Path | None, where: str) -> list[Any]:
    """Return a list of model entries with every glob replaced by its matches.

    A glob is a path with `*`, `?` or `[…]` that does not exist itself. Its matches beside the recipe, or else in the
    working directory, are in natural order: step 900 comes before step 1000. If their names differ in more than
    numbers (`run-resumed/checkpoint-1000` and `run/checkpoint-900`), the last number of each decides. Each match has
    the settings of the entry, except for `window`: how many steps to go back from the last checkpoint, by the last
    number in each name.

    Raises:
        RecipeError: If nothing matches, a window is given and a name has no number, or a parameter is a list.
    """
    found: list[Any] = []
    for index, entry in enumerate(models):
        path = entry.get("path") if isinstance(entry, Mapping) else entry
        if not isinstance(path, str) or not glob.has_magic(path) or exists(path):
            found.append(entry)
            continue
        matches = _find_matches(path, root)
        if not matches:
            raise RecipeError(f"{where}[{index}]: no checkpoint matches {path!r}{describe_places(path, root)}")
        if not isinstance(entry, Mapping):
            found += matches
            continue
        settings = {key: value for key, value in entry.items() if key != WINDOW}
        _refuse_lists(settings, len(matches), f"{where}[{index}]")
        if WINDOW in entry:
            matches = _apply_window(matches, entry[WINDOW], f"{where}[{index}].{WINDOW}")
        found += [{**settings, "path": match} for match in matches]
    return found


def _refuse_lists(settings: Mapping[str, Any], matches: int, where: str) -> None:
    """Refuse lists of numbers beside a glob: they read as a value for each match, but are gradients over depth."""
    nested = settings.get("parameters")
    for key, value in {**settings, **(nested if isinstance(nested, Mapping) else {})}.items():
        numbers = isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value)
        if numbers and key != "layers":
            raise RecipeError(
                f"{where}: {key} is a list beside a glob with {matches} matches; write each checkpoint as an entry "
                f"with its own {key}, or a gradient over depth for all of them under the recipe's parameters"
            )


def _apply_window(matches: list[str], window: Any, where: str) -> list[str]:
    if isinstance(window, bool) or not isinstance(window, (int, float)) or not window >= 0:
        raise RecipeError(f"{where}: expected a number of steps, got {window!r}")
    steps = _steps(matches)
    for match in matches:
        if match not in steps:
            raise RecipeError(f"{where}: {match!r} has no step number in its name")
    return [match for match, step in steps.items() if step >= max(steps.values()) - window]


def _find_matches(pattern: str, root: Path | None) -> list[str]:
    wanted = os.path.expanduser(pattern)
    for directory in (root, None) if root is not None else (None,):
        names = glob.glob(wanted, root_dir=directory)
        kept = [name for name in names if _is_checkpoint(name if directory is None else os.path.join(directory, name))]
        if kept:
            return _in_order(kept)
    return []


def _in_order(matches: list[str]) -> list[str]:
    ordered = sorted(matches, key=natural_order)
    alike = len({re.sub(r"\d+", "", match) for match in matches}) == 1
    steps = _steps(matches)
    return ordered if alike or len(steps) < len(matches) else sorted(ordered, key=steps.__getitem__)


def _steps(matches: list[str]) -> dict[str, int]:
    """Return the last number in each name that has one."""
    return {match: int(numbers[-1]) for match in matches if (numbers := re.findall(r"\d+", match))}


def _is_checkpoint(path: str) -> bool:
    return os.path.isdir(path) or path.endswith(SUFFIXES)
