"""Convert tinyBenchmarks' published pickle to an .npz file for the `calibration` of a run file.

    python examples/convert_tinybenchmarks.py tinyBenchmarks.pkl tinyBenchmarks.npz

Reading a pickle can run any code, so Merganser itself never reads one. Run this script only on a file you trust, or
in a container without a network. It needs only numpy. The result contains plain arrays:

    BENCHMARK/A, BENCHMARK/B, BENCHMARK/Theta     parameters of the items (1×D×N, 1×1×N), abilities (models × D)
    BENCHMARK/scenarios/NAME                      numbers of the items of a scenario
    BENCHMARK/anchors, BENCHMARK/weights/NAME     the published subset, and its weights by scenario
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def read(path: Path) -> Mapping[str, Any]:
    """Unpickle the file, which runs what is in it."""
    if path.read_bytes()[:6] == b"\x93NUMPY":
        return np.load(path, allow_pickle=True).item()
    with path.open("rb") as file:
        return pickle.load(file)


def flatten(benchmarks: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Name every array by its benchmark and its part."""
    arrays: dict[str, np.ndarray] = {}
    for name, entry in benchmarks.items():
        for part in ("A", "B", "Theta"):
            if part in entry["irt_parameters"]:
                arrays[f"{name}/{part}"] = np.asarray(entry["irt_parameters"][part], dtype=np.float64)
        for scenario, items in entry["scenarios_position"].items():
            arrays[f"{name}/scenarios/{scenario}"] = np.asarray(items, dtype=np.int64)
        if "seen_examples" in entry:
            arrays[f"{name}/anchors"] = np.asarray(entry["seen_examples"], dtype=np.int64)
        for scenario, weights in entry.get("examples_weights", {}).items():
            arrays[f"{name}/weights/{scenario}"] = np.asarray(weights, dtype=np.float64).reshape(-1)
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert tinyBenchmarks' pickle to .npz. Reading a pickle runs it.")
    parser.add_argument("pickle", type=Path, help="the published file, from a source you trust")
    parser.add_argument("out", type=Path, help="the .npz file to write")
    arguments = parser.parse_args()
    arrays = flatten(read(arguments.pickle))
    np.savez(arguments.out, **arrays)
    print(f"wrote {arguments.out}: {len(arrays)} arrays of {len({name.split('/')[0] for name in arrays})} benchmarks")


if __name__ == "__main__":
    main()
