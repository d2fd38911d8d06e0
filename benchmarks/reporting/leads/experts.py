"""Experts of one base."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks import answers
from benchmarks.reporting.formats import between, percent, series
from benchmarks.reporting.sections import adaptive as routing
from benchmarks.reporting.sections import forgetting as lines
from benchmarks.reporting.sections import mergeability as judged
from benchmarks.reporting.sections import multi_task
from benchmarks.reporting.sections.auto import shares_within_error


def experts(results: Mapping[str, Any]) -> str:
    found = multi_task.sheets(results)
    best = {sheet.best(): f"`{RECIPES.get(sheet.best(), sheet.best())}`" for sheet in found.values()}
    untuned = multi_task.UNTUNED
    said = [f"{percent(sheet.score(untuned).mean)} % with {n}" for n, sheet in found.items() if untuned in sheet.merges]
    without = f" Without them, `tsv` at scale 1 keeps {', '.join(said)} experts." if said else ""
    return (
        f"To merge many experts of one base, start with {' or '.join(best.values())} and choose the scale on a few "
        f"labelled examples.{without}"
    )


#: Rows of the tables, as recipes call the methods.
RECIPES = {"Iso-C": "iso_c", "Iso-CTS": "iso_cts", "TSV-M": "tsv", "ACE": "ace", "WUDI": "wudi", "TIES": "ties"}


def compression(results: Mapping[str, Any]) -> str:
    own = [row for row in results["rows"] if row["method"].startswith("codes")]
    if not own:
        return "How many bytes experts need."
    row, count = min(own, key=lambda row: row["bytes"]), len(results["experts"])
    each = round(results["base_bytes"] * count / row["bytes"])
    return (
        f"Store experts with `merganser library build --budget`: with 1/{each} of a checkpoint for each, {count} "
        f"experts keep {percent(row['normalised'])} % of their accuracy."
    )


def adaptive(results: Mapping[str, Any]) -> str:
    said, single = [], []
    for name, found in results["sets"].items():
        own = answers.read({"0": found["experts"]}, found["sentences"])
        kept = {
            row: answers.difference(answers.read({"0": stored["label"]}, found["sentences"]), None, own).mean
            for row, stored in found["rows"].items()
            if not stored.get("limit")
        }
        said.append(f"{percent(max(kept.values()))} % ({routing.TITLES.get(name, f'{name} tasks')})")
        single += [percent(kept["TSV-M"])] if "TSV-M" in kept else []
    return (
        "If requests do not say which task they belong to, use an adaptive model. The best one keeps "
        f"{series(said)} of the experts' accuracy" + (f", one merge for all {series(single)} %." if single else ".")
    )


def mergeability(results: Mapping[str, Any]) -> str:
    rows = judged.pairs_of(results)
    methods = list(rows[0]["methods"])
    rhos = [judged.own_correlation(rows, method) for method in methods]
    weights = max(
        abs(judged.correlation(rows, name, methods[0])) for name in rows[0]["signals"] if judged.of_weights(name)
    )
    return (
        "To see what a merge of experts loses, ask it a few hundred unlabelled inputs (`mg.analysis.pair_losses`): how "
        "often it answers otherwise than the experts ranks pairs by what they lose with a correlation of "
        f"{between(rhos, 2)}, depending on the method. No signal of the weights alone exceeds {weights:.2f} for the "
        f"{methods[0]}."
    )


def autopilot(results: Mapping[str, Any]) -> str:
    runs, best = results["runs"], results["best"]
    close = sum(run["behind"] <= best["error"] for run in runs)
    behind = 100 * sum(run["behind"] for run in runs) / len(runs)
    return (
        f"For {between([100 * run['share'] for run in runs], 0)} % of the questions of a full grid, `merganser auto` "
        f"finds a merge whose test accuracy is {abs(behind):.1f} points {'below' if behind > 0 else 'above'} that of "
        f"the grid's best on average ({close} of {len(runs)} runs within one standard error)."
    )


def theory(results: Mapping[str, Any]) -> str:
    rows = {row["experts"]: row["normalised"] for row in results.get("merging", ())}
    if not rows:
        return "After one epoch of full-batch descent, adding task vectors equals training on all tasks at once."
    return (
        "Try to merge experts before they are trained to the end: merged after the first epoch, these keep "
        f"{percent(rows['first epoch'])} % of the final experts' accuracy; merged at the end, "
        f"{percent(rows['last epoch'])} %."
    )


JOINT = "joint training"


def alternating(results: Mapping[str, Any]) -> str:
    rows = {row["method"]: fmean(row["accuracies"]) for row in results["rows"]}
    best = max((name for name in rows if "ATM" in name), key=lambda name: rows[name])
    return (
        "If you can train, merge early and often (`mg.tuning.atm`): short rounds of fine-tuning and merging reach "
        f"{percent(rows[best])} % where one merge at the end reaches {percent(rows['task arithmetic'])} %"
        + (f", and joint training on all data {percent(rows[JOINT])} %." if JOINT in rows else ".")
    )


def forgetting(results: Mapping[str, Any]) -> str:
    (learns, knew), rates = next(
        (stage, found) for stage, found in lines.stages_of(results).items() if stage[1] != lines.STORIES
    )
    rate, found = min(rates.items())
    last, chosen = found["path"][-1], lines.best_of_both(found)
    return (
        "Fine-tune at a low rate. If a fine-tune still forgot too much, go some of the way back to its base (WiSE-FT, "
        f"`mg.tuning.forgetting.forgetting_path`). A fine-tune for {learns} answers {percent(last['learned'])} % of "
        f"them right, and {percent(last['kept'])} % of the {knew} that it was trained for before; "
        f"{percent(1 - chosen['at'], 0)} % of the way back, {percent(chosen['learned'])} and "
        f"{percent(chosen['kept'])} % (rate {rate:g})."
    )


def simulated(results: Mapping[str, Any]) -> str:
    means = {
        kind: [100 * sum(own[kind]) / len(own[kind]) for own in results.values()] for kind in ("grid", "autopilot")
    }
    close, again = zip(*(shares_within_error(own) for own in results.values()), strict=True)
    return (
        f"Expect the autopilot's merge to be {between(means['autopilot'])} points below the truly best one, where the "
        f"best of a full grid is {between(means['grid'])} points below it. Its distance to the grid's choice is at "
        f"most one standard error in {between([100 * share for share in close], 0)} % of exams; a second full grid, on "
        f"other questions, achieves that in {between([100 * share for share in again], 0)} %. More questions help both."
    )
