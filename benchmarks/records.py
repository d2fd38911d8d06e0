"""Stored results: what was measured, by which command, with which seeds, when and on what machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe

RESULTS = Path(__file__).parent / "results"
#: Options whose value is a place on the machine that measured.
PLACES = ("--data", "--cache", "--json", "--workdir", "--mergekit", "--py-irt", "--fusionbench")


def command() -> str:
    """The command line that is running, without this machine's paths."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument in PLACES:
            next(arguments, None)
        elif not argument.startswith(tuple(f"{place}=" for place in PLACES)):
            kept.append(argument)
    return " ".join(["python -m", module.name if module else Path(sys.argv[0]).stem, *kept])


def record(path: Path | None, results: Any, seeds: Iterable[int] = ()) -> None:
    """Write `results` to `path` with everything needed to measure them again; nothing when no path is given."""
    if path is None:
        return
    stored = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe(),
        "seeds": list(seeds),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(stored, indent=1) + "\n")
    draft.replace(path)


def stored(name: str) -> dict[str, Any] | None:
    """The record `benchmarks/results/NAME.json`, or None where nothing was measured yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
