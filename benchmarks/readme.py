"""Rewrites the generated parts of README.md and docs/parity.md from the method registry and stored results.

    python -m benchmarks.readme [--check]

Numbers come from `benchmarks/results/*.json`, which the benchmarks write with `--json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.records import stored
from merganser.methods.catalogue import table

ROOT = Path(__file__).parents[1]


def speed() -> str:
    found = stored("merge_speed")
    if found is None:
        return "Not measured yet: `python -m benchmarks.merge_speed --mergekit BIN`."
    measured = found["results"]
    lines = [
        f"`python -m benchmarks.merge_speed`: a base and three models of {measured['params']} parameters in bfloat16, "
        f"warm cache, everything synced; {found['machine']}. The limit reads the inputs and writes the output with "
        f"plain copies; the ratio to it leaves out the {measured['start_up']:.1f} s of start-up. "
        f"{measured.get('note', '')}",
        "",
        "| method | seconds | × limit | peak memory | mergekit, seconds | times faster | mergekit, peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, row in measured["methods"].items():
        ours, peer = row["ours"], row.get("mergekit")
        cells = [f"`{method}`", f"{ours['seconds']:.1f}", f"{row['ratio_to_limit']:.1f}", mib(ours)]
        cells += [f"{peer['seconds']:.0f}", f"**{row['times_faster']:.1f}×**", mib(peer)] if peer else ["–", "–", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mib(run: dict[str, Any]) -> str:
    return f"{run['peak_anonymous'] / 2**20:.0f} MiB"


def parity() -> str:
    found = stored("parity")
    if found is None:
        return "Not measured yet: `python -m benchmarks.parity --mergekit BIN`."
    lines = ["| recipe | of the largest weight | of the largest change | |", "|---|---|---|---|"]
    for case, gap in found["results"].items():
        verdict = "equal" if gap["of_weight"] <= 1e-5 else "differs"
        lines.append(f"| {case} | {gap['of_weight']:.1e} | {gap['of_change']:.1e} | {verdict} |")
    return "\n".join(lines)


def draw_speed(path: Path) -> None:
    """Seconds of every method: the limit, ours, mergekit's."""
    found = stored("merge_speed")
    if found is None:
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "merganser"  # the same file every time
    from matplotlib import pyplot

    measured = found["results"]
    rows = {name: row for name, row in measured["methods"].items() if "mergekit" in row}
    figure, axes = pyplot.subplots(figsize=(8, 0.55 * len(rows) + 1.2), layout="constrained")
    series = (("limit", "plain copy", "#b0b7c3"), ("ours", "merganser", "#2a78d6"), ("mergekit", "mergekit", "#e07b39"))
    for offset, (key, label, colour) in enumerate(series):
        places = [number + (offset - 1) * 0.27 for number in range(len(rows))]
        values = [row[key]["seconds"] for row in rows.values()]
        axes.bar_label(axes.barh(places, values, 0.25, label=label, color=colour), fmt="%.0f", padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds, {measured['params']} parameters in bfloat16, 2 cores")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


PARTS = {"README.md": {"speed": speed, "methods": table}, "docs/parity.md": {"parity": parity}}


def rewritten(file: str) -> str:
    text = (ROOT / file).read_text()
    for mark, make in PARTS[file].items():
        before, begin, rest = text.partition(f"<!-- {mark}:begin -->\n")
        _, end, after = rest.partition(f"<!-- {mark}:end -->")
        text = f"{before}{begin}{make().strip()}\n{end}{after}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    stale = [file for file in PARTS if rewritten(file) != (ROOT / file).read_text()]
    if parser.parse_args().check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make readme")
    for file in stale:
        (ROOT / file).write_text(rewritten(file))
    draw_speed(ROOT / "docs" / "images" / "merge_speed.svg")


if __name__ == "__main__":
    main()
