"""Data of checkpoints, recipes and methods for the screens."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from merganser.errors import InputError, MerganserError
from merganser.plain import to_yaml
from merganser.studio.problems import list_problems
from merganser.studio.roots import Roots


def show_checkpoint(roots: Roots, path: str) -> dict[str, Any]:
    """Return the contents of a checkpoint from its headers, its config, and the card of the merge it came from."""
    from merganser.checkpoints.json_file import read_config
    from merganser.report.checkpoints import checks_table
    from merganser.report.contents import contents
    from merganser.report.sidecars import read_card

    opened = roots.open(path)
    found = contents(opened)
    directory = opened.directory if roots.find(path.partition("+")[0]).is_dir() else None
    card = read_card(directory) if directory else None
    checks = checks_table(directory, found).rows if directory else []
    config = {k: v for k, v in read_config(directory).items() if isinstance(v, (str, int, float, bool))}
    return {
        "path": path,
        **found.to_dict(),
        "label": path,
        "config": config,
        "recipe": card.recipe if card else None,
        "made": card.facts() if card else [],
        "checks": [{"check": row[0], "holds": row[1] == "yes"} for row in checks],
    }


def compare_checkpoints(roots: Roots, first: str, second: str) -> Iterator[dict[str, Any]]:
    """Yield for every tensor how far the second checkpoint is from the first, relative to the first's norm.

    Yields:
        A `start` with the number of tensors; then for each `name`, `block`, `distance` ‖b − a‖ / ‖a‖, `cosine` and
        `changed`, the share of entries that differ; last an `end` with what only one of them has.
    """
    from merganser.checkpoints.base import is_integer, row_blocks
    from merganser.checkpoints.tensor_names import block_of, natural_order

    a, b = roots.open(first), roots.open(second)
    shared = [n for n in sorted(a.names(), key=natural_order) if n in b and not is_integer(a.spec(n).dtype)]
    equal = [name for name in shared if a.spec(name).shape == b.spec(name).shape]
    yield {"event": "start", "total": len(equal)}
    for name in equal:
        spec = a.spec(name)
        sums = [0.0] * 5
        for rows in row_blocks(spec) if spec.shape else [None]:
            x, y = a.read(name, rows).float(), b.read(name, rows).float()
            parts = ((x * x).sum(), (y * y).sum(), (x * y).sum(), (y - x).square().sum(), (x != y).sum())
            sums = [total + float(part) for total, part in zip(sums, parts, strict=True)]
        xx, yy, xy, dd, differing = sums
        yield (
            {
                "event": "tensor",
                "name": name,
                "block": block_of(name),
                "parameters": spec.numel,
                "distance": math.sqrt(dd / xx) if xx else math.nan,
                "square": dd,
                "norm": xx,
                "cosine": xy / math.sqrt(xx * yy) if xx and yy else math.nan,
                "changed": differing / max(1, spec.numel),
            }
        )
    yield {
        "event": "end",
        "only_first": [name for name in a.names() if name not in b][:20],
        "only_second": [name for name in b.names() if name not in a][:20],
        "reshaped": [name for name in shared if name not in set(equal)][:20],
    }


def show_methods() -> list[dict[str, Any]]:
    """Return what the schema of recipes does not say of every method: what it needs and how much it must see."""
    from merganser.methods.catalogue import catalogue

    names = ("name", "also", "base", "reach", "statistics")
    return [{name: getattr(row, name) for name in names} for row in catalogue()]


def read_recipe(roots: Roots, written: str | Mapping[str, Any], beside: str | None = None) -> dict[str, Any]:
    """Return a recipe as text and as a document, with its plan or what is wrong with it.

    Args:
        roots: The directories that models may be in.
        written: The text of a recipe, in either dialect, or a native document.
        beside: The directory that relative paths are looked for in first.
    """
    from merganser.recipes.documents import parse
    from merganser.recipes.loading import load

    text = written if isinstance(written, str) else to_yaml(written)
    found: dict[str, Any] = {
        "text": text,
        "document": None,
        "dialect": "native",
        "native": None,
        "plan": None,
        "problems": [],
    }
    try:
        documents = parse(text)
        document = documents[0] if len(documents) == 1 else None
        found["document"] = document if isinstance(document, dict) else None
        found["dialect"] = "mergekit" if "merge_method:" in text else "native"
        if found["dialect"] == "mergekit":
            with contextlib.suppress(MerganserError):  # the plan reports the problem better
                found["native"] = to_yaml(load(text if "\n" in text else f"{text}\n").document, compact=True)
        found["plan"] = _plan(roots, text, beside)
    except MerganserError as error:
        found["problems"] = list_problems(str(error), text)
    return found


def _plan(roots: Roots, text: str, beside: str | None) -> dict[str, Any]:
    from merganser.checkpoints.sidecars import prepare_sidecars
    from merganser.engine.workers import DEFAULT_MEMORY
    from merganser.report.plans import summarise

    merge = roots.prepare(text, beside)
    prepare_sidecars(merge.plan.sidecars, merge.sources)
    summary = summarise(merge, DEFAULT_MEMORY)
    return summary | {"copied": sum(output.copies for output in merge.plan.outputs)}


def save_recipe(roots: Roots, path: str, text: str, overwrite: bool = False) -> str:
    """Write a recipe to a file and return its path as the page shows it.

    Raises:
        InputError: If the place is outside, is no YAML file, or is taken.
    """
    place = roots.find(path)
    if place.suffix not in (".yml", ".yaml"):
        raise InputError(f"{path}: a recipe is a file that ends in .yml")
    if place.exists() and not overwrite:
        raise InputError(f"{path}: there is a file of that name already")
    new = place.with_name(f".{place.name}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        os.replace(new, place)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    return roots.show(place)
