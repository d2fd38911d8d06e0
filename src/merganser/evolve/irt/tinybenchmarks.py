"""Item parameters and abilities as tinyBenchmarks publishes them.

The published file is a pickle, and a pickle is a program. It is read by an unpickler that can build numbers, strings,
containers and numpy arrays and refuses everything else by name, so nothing in the file gets to run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from merganser.errors import InputError, did_you_mean
from merganser.evolve.arrays import Array
from merganser.evolve.irt.model import IRT, Items, Normal
from merganser.evolve.subsets import Subset

_HARMLESS = {
    ("builtins", name)
    for name in (
        "dict",
        "list",
        "tuple",
        "set",
        "frozenset",
        "int",
        "float",
        "bool",
        "str",
        "bytes",
        "complex",
        "slice",
    )
} | {
    ("collections", "OrderedDict"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


@dataclass(frozen=True)
class TinyBenchmark:
    """One benchmark of the file: its IRT, and per scenario the items it covers and the published anchor subset."""

    irt: IRT
    scenarios: Mapping[str, np.ndarray[Any, np.dtype[np.intp]]]
    anchors: Mapping[str, Subset]


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _HARMLESS:
            raise InputError(
                f"the pickle asks for {module}.{name}, which is not plain data; refused because unpickling it could "
                "run code. Save the arrays with numpy.savez or as a dict of arrays and load that"
            )
        return super().find_class(module, name)


def read_data(path: str | PathLike[str]) -> Any:
    """A pickle or .npy file of plain data (numbers, strings, containers, numpy arrays); anything else is refused."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if raw.startswith(b"\x93NUMPY"):  # np.save of a dict: a header, then a pickle of a 0-d object array
        header = 10 + int.from_bytes(raw[8:10], "little") if raw[6] == 1 else 12 + int.from_bytes(raw[8:12], "little")
        raw = raw[header:]
    try:
        data = _DataUnpickler(io.BytesIO(raw)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a readable pickle: {error}") from error
    return data.item() if isinstance(data, np.ndarray) and data.ndim == 0 else data


def load(path: str | PathLike[str], benchmark: str = "lb") -> TinyBenchmark:
    """Read `benchmark` (lb, mmlu, helm_lite or alpaca in the published file)."""
    data = read_data(path)
    if not isinstance(data, dict) or not data:
        raise InputError(f"{path} holds a {type(data).__name__}, not tinyBenchmarks' dictionary of benchmarks")
    if benchmark not in data:
        raise InputError(f"{path} has no benchmark {benchmark!r}{did_you_mean(benchmark, map(str, data))}")
    entry = data[benchmark]
    for key in ("irt_parameters", "scenarios_position"):
        if key not in entry:
            raise InputError(f"benchmark {benchmark!r} of {path} has no {key!r}; found {', '.join(map(str, entry))}")
    parameters = entry["irt_parameters"]
    items = _items(parameters, f"benchmark {benchmark!r} of {path}")
    scenarios = {str(k): np.asarray(v, dtype=np.intp) for k, v in entry["scenarios_position"].items()}
    return TinyBenchmark(_irt(items, parameters), scenarios, _anchors(entry, scenarios))


def _items(parameters: Mapping[str, Any], where: str) -> Items:
    """A is 1 × D × N and B is 1 × 1 × N in the file, with z = Σ_d (A_d θ_d − B) = A·θ − D B: the published models were
    fitted and are read with the difficulty inside the sum over dimensions."""
    if missing := {"A", "B"} - set(parameters):
        raise InputError(f"irt_parameters of {where} lack {', '.join(sorted(missing))}")
    a, b = (np.asarray(parameters[key], dtype=np.float64) for key in ("A", "B"))
    if a.ndim != 3 or a.shape[0] != 1 or b.size != a.shape[2]:
        raise InputError(f"irt_parameters of {where}: A has shape {a.shape} and B {b.shape}; expected 1×D×N and 1×1×N")
    return Items(np.ascontiguousarray(a[0].T), a.shape[1] * b.reshape(-1))


def _irt(items: Items, parameters: Mapping[str, Any]) -> IRT:
    dimensions = items.discrimination.shape[1]
    theta: Array = np.asarray(parameters.get("Theta", np.zeros((0, dimensions))), dtype=np.float64)
    theta = theta.reshape(-1, dimensions)
    if len(theta) > 1:
        prior = Normal(theta.mean(0), 1 / np.maximum(theta.var(0), 1e-3))
    else:
        prior = Normal(np.zeros(dimensions), np.ones(dimensions))
    return IRT(theta, items, prior)


def _anchors(entry: Mapping[str, Any], scenarios: Mapping[str, Any]) -> dict[str, Subset]:
    """`seen_examples` lists the anchors of all scenarios; a scenario's are the ones in its range.

    An item that stands for two clusters is listed twice (once in helm_lite as published): here once, with both weights.
    """
    seen = np.asarray(entry.get("seen_examples", ()), dtype=np.intp)
    weights = entry.get("examples_weights", {})
    anchors = {}
    for name, positions in scenarios.items():
        inside = seen[np.isin(seen, positions)]
        weight = np.asarray(weights.get(name, ()), dtype=np.float64).reshape(-1)
        if len(inside) and len(weight) == len(inside):
            items, place = np.unique(inside, return_inverse=True)
            anchors[name] = Subset(items, np.bincount(place, weight) / weight.sum())
    return anchors
