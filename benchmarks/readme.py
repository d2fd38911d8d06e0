"""Rewrites the generated parts of README.md, docs/parity.md and docs/choosing.md from stored results.

    python -m benchmarks.readme [--check]

Numbers come from `benchmarks/results/*.json`, which the benchmarks write with `--json`; `benchmarks.report` draws the
figures and builds the pages of results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.records import stored
from benchmarks.reporting import markdown
from benchmarks.reporting.formats import mebibytes, percent
from benchmarks.reporting.parts import Table
from benchmarks.reporting.sections import multi_task
from benchmarks.reporting.sections import speed as merging

ROOT = Path(__file__).parents[1]


#: The rows of the README's table; all methods are in docs/results/speed.md.
SHOWN = ("linear", "task_arithmetic", "slerp", "ties", "dare_ties", "della")


def speed() -> str:
    found = stored("merge_speed")
    measured = found["results"]
    rows = [
        [
            f"`{method}`",
            f"{row['ours']['seconds']:.1f} s",
            f"{row['mergekit']['seconds']:.0f} s",
            f"**{row['times_faster']:.1f}×**",
            mebibytes(row["ours"]["peak_anonymous"]),
            mebibytes(row["mergekit"]["peak_anonymous"]),
        ]
        for method, row in measured["methods"].items()
        if method in SHOWN and "mergekit" in row
    ]
    columns = ["method", "Merganser", "mergekit", "times faster", "peak memory", "mergekit's"]
    intro = (
        f"A base and three models of {measured['params']} parameters in bfloat16, start-up included, "
        f"{found['machine']} (`{found['command']}`):"
    )
    return f"{intro}\n\n{markdown.table(Table(columns, rows))}"


def headline() -> str:
    """Return the first paragraph of the README, with the ranges over all methods that mergekit ran too."""
    rows = [row for row in stored("merge_speed")["results"]["methods"].values() if "mergekit" in row]
    times = [row["times_faster"] for row in rows]
    memory = [row["mergekit"]["peak_anonymous"] / row["ours"]["peak_anonymous"] for row in rows]
    return (
        "Merganser combines trained neural networks into one, without training them again: fine-tunes of a language\n"
        "model, LoRA adapters, GGUF files, diffusion pipelines, or networks of your own. It runs mergekit's recipes\n"
        f"unchanged, {min(times):.1f} to {max(times):.0f} times as fast and with {min(memory):.0f} to {max(memory):.0f}"
        " times less memory\n([measured](#compared-with-mergekit))."
    )


def parity() -> str:
    return markdown.table(merging.parity_table(stored("parity")["results"]))


def dialect() -> str:
    return markdown.table(merging.dialect_table(stored("parity_dialect")["results"]))


#: The methods of the table that helps to choose one, as recipes call them.
COMPARED = {
    "task arithmetic": "task_arithmetic",
    "TIES": "ties",
    "WUDI": "wudi",
    "TSV-M": "tsv",
    "Iso-C": "iso_c",
    "Iso-CTS": "iso_cts",
}


def evidence() -> str:
    columns = {
        f"{count} {kind} experts": sheet
        for kind, name in (("text", "multi_task"), ("image", "multi_task_images"))
        for count, sheet in multi_task.sheets(stored(name)["results"]).items()
    }
    rows = [
        [f"`{name}`", *(percent(sheet.score(row).mean) if row in sheet.merges else "–" for sheet in columns.values())]
        for row, name in COMPARED.items()
    ]
    return markdown.table(Table(["method", *columns], rows))


PARTS = {
    "README.md": {"headline": headline, "speed": speed},
    "docs/parity.md": {"parity": parity, "dialect": dialect},
    "docs/choosing.md": {"evidence": evidence},
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
