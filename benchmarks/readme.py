"""Rewrites the generated parts of README.md and docs/parity.md from the method registry and stored results.

    python -m benchmarks.readme [--check]

Numbers come from `benchmarks/results/*.json`, which the benchmarks write with `--json`; `benchmarks.report` draws the
figures and builds docs/results.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.records import stored
from benchmarks.reporting import markdown
from benchmarks.reporting.sections import multi_task
from benchmarks.reporting.sections import speed as merging
from merganser.methods.catalogue import table

ROOT = Path(__file__).parents[1]


def speed() -> str:
    found = stored("merge_speed")
    measured = found["results"]
    intro = f"`{found['command']}`, {found['machine']}. {merging.conditions(measured)}"
    return f"{intro}\n\n{markdown.table(merging.table(measured))}"


def quality() -> str:
    found = stored("multi_task")
    measured = found["results"]
    sizes = sorted({row["tasks"] for row in measured["rows"]})
    intro = (
        f"`{found['command']}`: MiniLM experts of {', '.join(map(str, sizes[:-1]))}{' and ' if sizes[:-1] else ''}"
        f"{sizes[-1]} text tasks merged into one encoder, each task answered through its own head; accuracy over that "
        f"of the experts; {multi_task.errors(measured)}. More in [docs/results.md](docs/results.md)."
    )
    return f"{intro}\n\n{markdown.table(multi_task.brief(measured))}"


def parity() -> str:
    return markdown.table(merging.parity_table(stored("parity")["results"]))


def dialect() -> str:
    return markdown.table(merging.dialect_table(stored("parity_dialect")["results"]))


PARTS = {
    "README.md": {"speed": speed, "quality": quality, "methods": table},
    "docs/parity.md": {"parity": parity, "dialect": dialect},
}


def rewritten(file: str) -> str:
    text = (ROOT / file).read_text()
    for mark, make in PARTS[file].items():
        before, begin, rest = text.partition(f"<!-- {mark}:begin -->\n")
        _, end, after = rest.partition(f"<!-- {mark}:end -->")
        if not begin or not end:
            sys.exit(f"{file}: no place for {mark}; expected <!-- {mark}:begin --> and <!-- {mark}:end -->")
        text = f"{before}{begin}{make().strip()}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    stale = [file for file in PARTS if rewritten(file) != (ROOT / file).read_text()]
    if parser.parse_args().check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make results")
    for file in stale:
        (ROOT / file).write_text(rewritten(file))


if __name__ == "__main__":
    main()
