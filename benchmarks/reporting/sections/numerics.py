"""The kernels against the published algorithms: decompositions, the universe, item response theory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.reporting.formats import number, percent
from benchmarks.reporting.parts import Axis, Figure, Lines, Part, Table, Text


def lowrank(results: Mapping[str, Any]) -> Iterator[Part]:
    merges = results["merging"]
    yield Text(
        f"Merges of the matrices of a transformer block (threads: {results['threads']}) are compared with a plain "
        "implementation of the published algorithms (full SVDs in float32 of the task matrices, their sum or the "
        "concatenations), alternating in one run. The matrices have power-law spectra over a noise floor, as trained "
        "differences have. Memory is what a merge needs beyond its inputs, in float32 copies of the matrix."
    )
    columns = ["method", "block", "tasks", "seconds", "published, seconds", "times faster", "less processor time"]
    yield Table(
        [*columns, "memory, matrices", "largest error against float64"], [_merge_row(merge) for merge in merges]
    )
    if any(merge["extrapolated"] for merge in merges):
        yield Text(
            "\\* Extrapolated: one SVD of a task matrix and those of the concatenated factors were timed, and the "
            "first was counted once for every task."
        )
    limits = [f"{merge['limit_ratio']:.1f}× ({merge['block']})" for merge in merges if "limit_ratio" in merge]
    if limits:
        yield Text(
            "The products and eigenvectors that `tsv` cannot do without limit how much less processor time it can "
            f"take: {', '.join(limits)}."
        )
    errors = [row["ours_error"] for merge in merges for row in merge["matrices"] if "ours_error" in row]
    if far := [error for error in errors if error > 1e-4]:
        yield Text(f"{len(far)} of {len(errors)} matrices differ by more than 1e-4 from the published algorithm.")
    memory, library, rebuilding = results["memory"], results["library"], results["rebuilding"]
    kept = "; ".join(
        f"{dtype} {found['ratio']:.2f}× the base with {percent(found['energy'])} % of the energy"
        for dtype, found in library.items()
        if isinstance(found, Mapping)
    )
    low, high = memory["layers"][0], memory["layers"][-1]
    yield Text(
        f"The peak memory of a streamed merge with {high} layers is {memory['ratio']:.2f}× that with {low}. A library "
        f"of {library['experts']} experts (random matrices, whose energy is spread over more directions than that of "
        f"trained ones) takes: {kept}. Rebuilding one expert takes {rebuilding['rebuild_over_copy']:.1f}× the "
        "time of copying the base."
    )


def _merge_row(merge: Mapping[str, Any]) -> list[str]:
    rows = merge["matrices"]
    errors = [row["ours_error"] for row in rows if "ours_error" in row]
    return [
        f"`{merge['method']}`",
        merge["block"],
        str(merge["tasks"]),
        f"{sum(row['ours'] for row in rows):.1f}",
        f"{sum(row['published'] for row in rows):.1f}" + ("\\*" if merge["extrapolated"] else ""),
        f"{merge['speedup']:.1f}×",
        f"{merge['processor_ratio']:.1f}×",
        f"{max(row['ours_memory'] for row in rows):.1f}",
        f"{max(errors):.1e}" if errors else "–",
    ]


def alignment(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(
        "Frank-Wolfe over all models at once is compared with a plain version of the published algorithm: processor "
        "seconds, and the objective reached (larger is better), on untrained networks of different seeds, one run "
        "each. Three iterations of the published algorithm are timed; the number of iterations it needs is found with "
        "a faster evaluation of the same numbers."
    )
    rows = [
        [
            case["network"],
            str(case["models"]),
            f"{case['ours_seconds']:.1f}",
            f"{case['reference_seconds']:.1f}",
            f"{case['ratio']:.1f}×",
            f"{case['ratio_of_iterations']:.1f}×" if "ratio_of_iterations" in case else "–",
            f"{case['ours_objective'] / case['reference_objective']:.4f}",
            f"{case['ours_iterations']} / {case['reference_iterations']}",
        ]
        for case in results.get("compare", ())
    ]
    columns = ["network", "models", "seconds", "published, seconds", "times faster", "an iteration, times faster"]
    if rows:
        yield Table([*columns, "objective, Merganser / published", "iterations, Merganser / published"], rows)
    yield from _alignment_parts(results)
    if scale := results.get("scale"):
        line = [(int(count), value) for count, value in scale["seconds"].items()]
        axes = Axis("models", log=True), Axis("processor seconds", log=True)
        yield Text(f"The time of an iteration grows as n^{scale['growth']:.2f} in the number of models.")
        yield Figure("alignment_scale", "Time of a Frank-Wolfe iteration", [Lines({"one iteration": line}, *axes)])
    if memory := results.get("memory"):
        yield Text(
            f"Matching three ResNet20 of width {memory['width']}× takes at most {memory['peak_gigabytes']:.1f} GB."
        )


def _alignment_parts(results: Mapping[str, Any]) -> Iterator[Part]:
    if starts := results.get("starts"):
        rows = [
            [name, f"{row['seconds']:.1f}", f"{row['objective']:.1f}", number(row["iterations"])]
            for name, row in starts.items()
        ]
        columns = ["start", "processor seconds", "objective", "iterations"]
        yield Table(columns, rows, "C²M³ of five untrained MLPs from the printed start and from the default")
    if solvers := results.get("assignments"):
        rows = [
            [
                name,
                f"{row['compiled']:.1f}",
                f"{row['scipy']:.1f}",
                f"{row['scipy'] / row['compiled']:.1f}×",
                "yes" if row["same_permutations"] else "no",
            ]
            for name, row in solvers.items()
        ]
        columns = ["networks", "compiled, seconds", "scipy, seconds", "times faster", "same permutations"]
        yield Table(columns, rows, "C²M³ of five MLPs by the solver of its linear assignments")
    if widths := results.get("widths"):
        rows = [
            [name, f"{row['parameters'] / 1e6:.1f}M", f"{row['seconds']:.1f}", number(row["iterations"])]
            for name, row in widths.items()
        ]
        columns = ["three networks", "parameters of each", "processor seconds", "iterations"]
        yield Table(
            columns, rows, "C²M³ by width (untrained; the thesis prints 33 s for 1× to 716 s for 16× on its machine)"
        )


def irt(results: Mapping[str, Any]) -> Iterator[Part]:
    yield Text(
        "Item response theory is fitted to simulated answers. The table shows processor seconds and the log-loss of "
        f"held-out answers. The true probabilities have a log-loss of {results['entropy']:.4f}."
    )
    rows = [
        [
            f"{fit['dimensions']}{' (chosen)' if fit['chosen'] else ''}",
            f"{fit['seconds']:.2f}",
            f"{fit['log_loss']:.4f}",
            number(fit.get("peer_seconds")),
            f"{fit['peer_log_loss']:.4f}" if "peer_log_loss" in fit else "–",
            f"{fit['times_faster']:.0f}×" if "times_faster" in fit else "–",
        ]
        for fit in results["fits"]
    ]
    yield Table(["dimensions", "seconds", "log-loss", "py-irt, seconds", "py-irt, log-loss", "times faster"], rows)
