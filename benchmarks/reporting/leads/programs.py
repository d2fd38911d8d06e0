"""Speed, and other programs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.reporting.formats import between


def merge_speed(results: Mapping[str, Any]) -> str:
    rows = [row for row in results["methods"].values() if "times_faster" in row]
    if not rows:
        return "How long a merge takes, and how much memory."
    ratios = [row["cpu_ratio_to_limit"] for row in results["methods"].values() if "cpu_ratio_to_limit" in row]
    limit = (
        f" The median method takes {median(ratios):.1f} times the processor time of reading, adding and writing alone."
        if ratios
        else ""
    )
    return f"Merganser is {between([row['times_faster'] for row in rows])} times as fast as mergekit.{limit}"


def expressions(results: Mapping[str, Any]) -> str:
    return "An expression over task vectors costs about as much as copying the checkpoints, from Python or a recipe."


def decompositions(results: Mapping[str, Any]) -> str:
    rows = results["merging"]
    said = ", ".join(f"`{row['method']}` {row['processor_ratio']:.1f} on {row['block']}" for row in rows)
    return (
        f"Methods that decompose matrices take less processor time than the published algorithms (times: {said}), and "
        "memory does not grow with the number of layers."
    )


def peers(results: Mapping[str, Any]) -> str:
    rows = results["rows"]
    ours = {row["method"]: row for row in rows if row["program"] == "Merganser"}
    ratios = [
        row["cpu_seconds"] / ours[row["method"]]["cpu_seconds"]
        for row in rows
        if row["program"] != "Merganser" and row["method"] in ours
    ]
    return f"The same merges take other programs {between(ratios)} times the processor time, start-up included."


def parity(results: Mapping[str, Any]) -> str:
    differing = [name for name, gap in results.items() if gap["of_weight"] > 1e-5]
    return f"mergekit's recipes give the same weights here{f', except with {_list(differing)}' if differing else ''}."


def dialect(results: Mapping[str, Any]) -> str:
    silent = sum(case["verdict"] == "silent" for found in results.values() for case in found.values())
    if silent:
        return f"{silent} recipes give another result than mergekit without a note."
    return "If a recipe means something else here than in mergekit, the plan says so."


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
