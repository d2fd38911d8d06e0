"""Rewrites the generated parts of README.md, docs/parity.md and docs/choosing.md from stored results.

    python -m benchmarks.readme [--check]

Numbers come from `benchmarks/results/*.json`, which the benchmarks write with `--json`; `benchmarks.report` draws the
figures and builds the pages of results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

from benchmarks.records import stored
from benchmarks.reporting import markdown
from benchmarks.reporting.formats import mebibytes, percent
from benchmarks.reporting.parts import Table
from benchmarks.reporting.sections import mergeability, multi_task
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


#: The methods of the tables that help to choose one, as recipes call them, by their names in the results.
COMPARED = {
    "weight averaging": "linear",
    "task arithmetic": "task_arithmetic",
    "TIES": "ties",
    "TSV-M": "tsv",
    "Iso-C": "iso_c",
    "Iso-CTS": "iso_cts",
    "WUDI": "wudi",
    "ACE": "ace",
}


def kept() -> dict[str, dict[str, float]]:
    """Return the share of the experts' accuracy that methods keep: of pairs at scale 1, of others at the best scale."""
    pairs = mergeability.pairs_of(stored("mergeability")["results"])
    names = {"mean": "linear", "TIES": "ties", "TSV-M": "tsv", "Iso-C": "iso_c"}
    found = {"2 text": {name: 1 - fmean(mergeability.losses(pairs, row)) for row, name in names.items()}}
    for kind, record in (("text", "multi_task"), ("image", "multi_task_images")):
        for count, sheet in multi_task.sheets(stored(record)["results"]).items():
            found[f"{count} {kind}"] = {
                name: sheet.score(row).mean for row, name in COMPARED.items() if row in sheet.merges
            }
    return found


def of_three() -> dict[str, dict[str, tuple[float, float]]]:
    """Return the validation accuracy of merges of three experts at the best scale and at 1, by kind and method."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for kind, record in (("text", "auto"), ("image", "auto_images"), ("language models", "auto_language")):
        points: dict[str, dict[float, float]] = {}
        for row in stored(record)["results"]["grid"]:
            points.setdefault(row["method"], {})[round(row["scale"], 2)] = row["accuracy"]
        found[kind] = {method: (max(own.values()), own[1.0]) for method, own in points.items()}
    return found


def evidence() -> str:
    columns = kept()
    best = {column: max(own.values()) for column, own in columns.items()}
    rows = [
        [
            f"`{name}`",
            *(_leading(percent(own[name]), own[name] == best[c]) if name in own else "–" for c, own in columns.items()),
        ]
        for name in COMPARED.values()
    ]
    return markdown.table(Table(["method", *(f"{column} experts" for column in columns)], rows))


def threes() -> str:
    columns = of_three()
    best = {column: [max(scores) for scores in zip(*own.values(), strict=True)] for column, own in columns.items()}
    rows = []
    for name in (name for name in COMPARED.values() if all(name in own for own in columns.values())):
        cells = [
            [_leading(percent(score), score == top) for score, top in zip(own[name], best[column], strict=True)]
            for column, own in columns.items()
        ]
        rows.append([f"`{name}`", *(f"{tuned} ({plain})" for tuned, plain in cells)])
    models = stored("evolve_skills")["results"]["models"]
    tried = {name: models[name]["scores"]["mean"]["value"] for name in ("TIES", "SLERP", "task arithmetic")}
    order = sorted(tried, key=lambda name: -tried[name])
    said = ", ".join(f"{name} {percent(tried[name])} %" for name in order)
    two = f"Two language models, each method with the best of a grid, on unseen questions: {said}."
    table = markdown.table(Table(["method", *(f"3 {column}" for column in columns)], rows))
    return f"{table}\n\n{markdown.paragraph(two)}"


def _leading(cell: str, leads: bool) -> str:
    return f"**{cell}**" if leads else cell


PARTS = {
    "README.md": {"headline": headline, "speed": speed},
    "docs/parity.md": {"parity": parity, "dialect": dialect},
    "docs/choosing.md": {"evidence": evidence, "threes": threes},
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
