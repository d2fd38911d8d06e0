"""What it costs a merge to record what it changed: processor seconds of the same merge with and without.

    python -m benchmarks.studio_changes MODELS --base NAME --models NAME NAME

Both run in turn, the first one changing from pair to pair; the cost is that of pairs, so that what else the machine
does falls on both alike. The bar is 5 %.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

METHODS: dict[str, dict[str, float]] = {"task_arithmetic": {}, "ties": {"density": 0.5}}


def measure_pair(recipe: Path, out: Path, recorded_first: bool) -> tuple[float, float]:
    """Return the processor seconds of a merge without and with the record."""
    seconds = {}
    for recorded in (recorded_first, not recorded_first):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "merganser", "merge", str(recipe), str(out), "--json"]
        subprocess.run([*command, *([] if recorded else ["--no-changes"])], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[recorded] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        shutil.rmtree(out)
    return seconds[False], seconds[True]


def measure(folder: Path, base: str, models: list[str], pairs: int) -> None:
    """Print for every method the seconds of both, and the median cost over pairs with its quartiles."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        recipe, out = Path(place) / "recipe.json", Path(place) / "out"
        for method, parameters in METHODS.items():
            entries: list[dict[str, Any]] = [{"path": str(folder / name), "weight": 0.5} for name in models]
            document = {"method": method, "base": str(folder / base), "models": entries, "parameters": parameters}
            recipe.write_text(json.dumps(document), encoding="utf-8")
            measure_pair(recipe, out, True)  # fills the caches
            found = [measure_pair(recipe, out, bool(i % 2)) for i in range(pairs)]
            low, cost, high = statistics.quantiles([with_ / without - 1 for without, with_ in found], n=4)
            plain, recorded = (min(column) for column in zip(*found, strict=True))
            print(
                f"{method:<17} {plain:.2f} s of processor, {recorded:.2f} with the record (minima: "
                f"{recorded / plain - 1:+.1%}); pairs: median {cost:+.1%}, quartiles {low:+.1%} to {high:+.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--pairs", type=int, default=15)
    given = parser.parse_args()
    measure(given.folder.resolve(), given.base, given.models, given.pairs)


if __name__ == "__main__":
    main()
