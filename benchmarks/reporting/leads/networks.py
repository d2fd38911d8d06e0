"""Networks trained apart, and networks that differ."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.reporting.formats import between, error_of, percent

OURS = "C²M³"


def matched(name: str, results: Mapping[str, Any]) -> str:
    """Of networks trained apart: the best match of most of them, beside no match."""
    count = max(int(key) for key in results if key.isdigit())
    table, single, images = results[str(count)], fmean(results["single"]), results["settings"]["test_images"]
    most = max(row["repaired_accuracy"] for row in table.values())
    # Of ways that no standard error tells apart, the one that needs no data and no order, or at least no order.
    near = [way for way, row in table.items() if row["repaired_accuracy"] >= most - error_of(most, images)]
    likely = max(near, key=lambda way: table[way]["repaired_accuracy"])
    best = next((way for way in (OURS, f"{OURS} on activations") if way in near), likely)
    kept, plain = (percent(table[way]["repaired_accuracy"] / single, 0) for way in (best, "plain mean"))
    return (
        f"Match networks that were trained from different seeds before you average them. With {best} and REPAIR, the "
        f"mean of {count} {name} keeps {kept} % of the accuracy of one; without matching {plain} %."
    )


def transformers(results: Mapping[str, Any]) -> str:
    said = []
    names = {"gpt": "character models", "vit": "image classifiers", "vit-cifar10": "larger ones on CIFAR-10"}
    for kind, name in names.items():
        if kind not in results:
            continue
        pairs = [row for row in results[kind]["rows"] if len(row["seeds"]) == 2]
        barriers: dict[str, list[float]] = {}
        for row in pairs:
            way = "plain" if row["kind"] == "plain" else f"{row['kind']} by {row['source']}"
            if not row["repair"]:
                barriers.setdefault(way, []).append(row["barrier"])
        means = {way: fmean(values) for way, values in barriers.items()}
        best = min(means, key=lambda way: means[way])
        said.append(f"{name} from {means['plain']:.2f} to {means[best]:.2f} ({best})")
    return (
        'Align transformers with `kind="orthogonal"`. The best alignment lowers the loss barrier between two '
        f"{'; between two '.join(said)}. A barrier near 0 means that averaging costs nothing."
    )


def extras(results: Mapping[str, Any]) -> str:
    rows = [row["accuracy"] for key in ("references", "orders", "starts") for row in results.get(key, {}).values()]
    if not rows:
        return "Details of alignment, one question at a time."
    matters = "hardly matter" if max(rows) - min(rows) < 0.01 else "matter"
    return (
        f"Reference, order and start of alignment {matters} for these networks: their mean has an accuracy of "
        f"{percent(min(rows))} to {percent(max(rows))} %."
    )


def sampled(results: Mapping[str, Any]) -> str:
    """Of ensembles: what samples of the universe reach, beside one mean and the networks themselves."""
    rows = {name: percent(row["accuracy"]) for name, row in results["ensembles"].items()}
    best = max((name for name in rows if "samples of the universe" in name), key=lambda name: float(rows[name]))
    return (
        f"{best.partition(',')[0]} {'with REPAIR ' if 'REPAIR' in best else ''}classify {rows[best]} % correctly "
        f"together, one mean of all networks with REPAIR {rows['mean of the universe, REPAIR']} %, a network "
        f"{rows['single models']} %, and all networks together {rows['ensemble of the models']} %."
    )


def alignment_speed(results: Mapping[str, Any]) -> str:
    rows = results.get("compare", ())
    if not rows:
        return "What matching several networks costs."
    ratios = [row["ratio"] for row in rows]
    return (
        f"Matching several networks takes {between([row['ours_seconds'] for row in rows])} s of processor time, "
        f"{between(ratios)} times less than the published algorithm."
    )


def zipped(results: Mapping[str, Any]) -> str:
    reached = []
    for part, name in (("halves", "Fashion-MNIST"), ("cifar10_halves", "CIFAR-10")):
        joint: dict[str, list[float]] = {}
        for row in results.get(part, ()):
            joint.setdefault(row["method"], []).append(row["joint"])
        if {"zip", "permutations"} <= joint.keys():
            zips, others = (
                f"{percent(min(joint[way]))} to {percent(max(joint[way]))} %" for way in ("zip", "permutations")
            )
            reached.append(f"{zips} on {name}, where permutations reach {others}")
    said = f": over all classes {'; '.join(reached)}" if reached else ""
    return (
        f"Use `mg.align.zip` for networks that differ in classes or widths{said}. For networks of different depths, "
        "the average is only a start for training."
    )


def transplanted(results: Mapping[str, Any]) -> str:
    rows = {row["rule"].partition(":")[0]: row["perplexity"] for row in results["rows"]}
    own = rows.pop("as it was", None)
    best = min(rows, key=lambda rule: rows[rule])
    against = f" instead of {own:.1f}" if own else ""
    return (
        f"`--absent {best}` gives the lowest perplexity on {results['texts']} texts, {rows[best]:.1f}{against}. Every "
        "rule costs accuracy until the new embedding has been trained."
    )


def mixtures(results: Mapping[str, Any]) -> str:
    dense, mixed = (
        min(row["mean"] for row in results["rows"] if row["model"].startswith(start)) for start in ("merged", "mixture")
    )
    if mixed < dense:
        return f"A mixture without training is better than a dense merge (perplexity {mixed:.0f}, {dense:.0f})."
    return (
        f"Without training, a dense merge is better than a mixture (perplexity {dense:.0f}, {mixed:.0f}). Make a "
        "mixture if you are going to train it."
    )


def transported(results: Mapping[str, Any]) -> str:
    return (
        "Move a fine-tune to a new release of its base if that was trained on from the old one: nearly all arrives. "
        "If the bases were trained apart, fine-tune again."
    )
