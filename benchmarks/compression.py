"""Text experts in few bytes: codes chosen within a budget, TSV-Compress, masks, and plain low precision.

    python -m benchmarks.compression [--cache ZOO] [--tasks 8] [--test N] [--method M …] [--quick] [--resume]
                                     [--json FILE]

(`--method`: measure only lines of this method, such as "codes"; `--quick`: four experts, few sentences, one line;
`--resume` keeps the lines that FILE has already and measures the others). Every expert is rebuilt and scored on test
sentences of its own task. Only the tensors that training changed count: the frozen ones (three quarters of the base)
would flatter every ratio. Budgets are in units of the trained tensors' bytes in float32: `2.0× in all` leaves all
experts together as many bytes as one has. Budgets of codes are in units of the whole checkpoint, as users have it on
their disks.

Stored in `results`:

- `sentences`: test sentences of each task; `experts`: accuracies of the experts as trained; `trained_bytes`: the
  tensors that training changed; `base_bytes`: all of the base;
- `rows`: `method` (the family), `setting`, `dtype` of what is stored, `bytes` of all experts (with what they share),
  `ratio` = (trained_bytes + bytes) / trained_bytes, `per_expert` = bytes of one / trained_bytes, `ratio_to_base` with
  all tensors of the base counted, `largest` = bytes of the largest expert / base_bytes where each has its own file,
  `accuracy`, `normalised` (by the experts as trained) and `per_task`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import merganser as mg
from benchmarks.experts import State, summary
from benchmarks.records import record
from benchmarks.text_experts import TextExperts, load_experts
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text_tasks import TASK_SETS, TASKS
from merganser.library import Library, MaskLibrary
from merganser.library.codes.coding import Code, Delta, decode, dense, encode
from merganser.library.codes.levels import Levels
from merganser.library.codes.mixed_factors import MixedFactors
from merganser.library.codes.signs import Signs

Rebuilt = tuple[dict[str, State], Mapping[str, int]]
"""The experts as they come back, and the bytes of each; those they share count under no expert's name."""
SHARED = ""


@dataclass(frozen=True)
class Line:
    """One way to store the experts; `store` takes them and an empty directory."""

    method: str
    setting: str
    dtype: str
    store: Callable[[TextExperts, Path], Rebuilt]


def by_rank(fraction: float, dtype: str) -> Line:
    """TSV-C keeping this share of the components of every matrix."""
    return Line(
        "TSV-C", f"rank 1/{round(1 / fraction)}", dtype, lambda e, p: library(e, p, dtype, rank_fraction=fraction)
    )


def by_budget(share: float, dtype: str, setting: str) -> Line:
    """TSV-C with ranks allotted by energy; every expert may take `share` of the bytes of the trained tensors."""

    def store(experts: TextExperts, path: Path) -> Rebuilt:
        budget = int(share * experts.trained_bytes * len(experts.experts))
        return library(experts, path, dtype, budget=budget)

    return Line("TSV-C", setting, dtype, store)


def library(experts: TextExperts, path: Path, dtype: str, **ranks: Any) -> Rebuilt:
    built = Library.build(experts.trained, dict(experts.experts), path, dtype=dtype, **ranks)
    return rebuilt(built)


def rebuilt(built: Library) -> Rebuilt:
    size = built.size()
    return {name: built.expert(name).state_dict() for name in built.experts}, {**size.experts, SHARED: size.shared}


def codes_each(share: float, setting: str) -> Line:
    """Codes chosen within a budget of each expert's own: this share of the bytes of a whole expert."""

    def store(experts: TextExperts, path: Path) -> Rebuilt:
        budget = int(share * base_bytes(experts))
        (first, state), *others = experts.experts.items()
        built = Library.build(experts.trained, {first: state}, path, budget=budget)
        for name, other in others:
            built = built.add(name, other, budget=budget)
        return rebuilt(built)

    return Line("codes", setting, "mixed", store)


def codes_together(share: float, setting: str) -> Line:
    """Codes chosen within one budget for all experts: this share of the bytes of the base."""
    return Line(
        "codes, one budget",
        setting,
        "mixed",
        lambda e, p: rebuilt(Library.build(e.trained, dict(e.experts), p, budget=int(share * base_bytes(e)))),
    )


def one_code(method: str, code: Code, setting: str, dtype: str) -> Line:
    """Every matrix in the same code, vectors in eight bits."""

    def store(experts: TextExperts, _: Path) -> Rebuilt:
        found: dict[str, State] = {}
        sizes: dict[str, int] = {}
        for name, expert in experts.experts.items():
            found[name], sizes[name] = {}, 0
            for tensor, origin in experts.trained.items():
                coded = encode(Delta(expert[tensor] - origin), code if origin.dim() > 1 else Levels(0.06))
                found[name][tensor] = origin + dense(decode(coded.blob, origin.shape, tensor))
                sizes[name] += coded.nbytes
        return found, sizes

    return Line(method, setting, dtype, store)


def masks(experts: TextExperts, path: Path, **options: Any) -> Rebuilt:
    built = MaskLibrary.build(experts.trained, dict(experts.experts), path, **options)
    size = built.size()
    return {name: built.expert(name).state_dict() for name in built.experts}, {**size.experts, SHARED: size.shared}


def emr(dtype: torch.dtype) -> Line:
    """A bit for each weight over the elected vector."""
    return Line("EMR", "", short(dtype), lambda e, p: masks(e, p, kind="emr", dtype=dtype))


def tall(threshold: float) -> Line:
    """A bit for each weight over the sum of the task vectors; the threshold is κ."""
    return Line("TALL masks", f"κ {threshold:g}", "float32", lambda e, p: masks(e, p, threshold=threshold))


def tall_ties(threshold: float) -> Line:
    """A bit for each weight over the sum of the task vectors that TIES has trimmed and whose signs agree."""

    def store(experts: TextExperts, path: Path) -> Rebuilt:
        merged = mg.merge(experts.experts, "ties", experts.trained, density=0.2, normalize=False)
        return masks(experts, path, threshold=threshold, merged=merged)

    return Line("TALL masks + TIES", f"κ {threshold:g}", "float32", store)


def low_precision(dtype: torch.dtype) -> Line:
    """The task vectors as they are, rounded."""

    def store(experts: TextExperts, _: Path) -> Rebuilt:
        trained = experts.trained
        found: dict[str, State] = {}
        sizes: dict[str, int] = {}
        for name, expert in experts.experts.items():
            found[name], sizes[name] = {}, 0
            for tensor, origin in trained.items():
                delta, nbytes = rounded(expert[tensor] - origin, dtype)
                found[name][tensor] = origin + delta
                sizes[name] += nbytes
        return found, sizes

    return Line("task vectors, rounded", "", short(dtype), store)


def rounded(delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A tensor after a round trip through `dtype` and the bytes it took; int8 has a float32 scale for each row."""
    if dtype != torch.int8:
        stored = delta.to(dtype)
        return stored.to(delta.dtype), stored.nbytes
    rows = delta.reshape(delta.shape[0] if delta.dim() > 1 else 1, -1)
    scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    stored = (rows / scale).round().to(torch.int8)
    return (stored.to(delta.dtype) * scale).view(delta.shape), stored.nbytes + scale.nbytes


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def lines_for(count: int) -> tuple[Line, ...]:
    """Every way to store so many experts."""
    return (
        low_precision(torch.bfloat16),
        low_precision(torch.int8),
        *(tall(threshold) for threshold in (0.2, 0.4, 0.6)),
        *(tall_ties(threshold) for threshold in (0.2, 0.4, 0.6)),
        emr(torch.float32),
        emr(torch.bfloat16),
        *(by_rank(1 / count, dtype) for dtype in ("float32", "bfloat16", "int8")),
        *(by_rank(1 / parts, "int8") for parts in (2 * count, 4 * count)),
        *(by_budget(1 / count, dtype, "2.0× in all") for dtype in ("float32", "bfloat16", "int8")),
        by_budget(0.5 / count, "int8", "1.5× in all"),
        one_code("signs (BitDelta)", Signs("rows"), "a scale a row", "1 bit"),
        one_code("levels (UltraDelta-like)", Levels(1.0), "step 1.0", "2 bits"),
        one_code("mixed factors (Delta-CoMe)", MixedFactors(66), "rank 66", "8 to 2 bits"),
        codes_each(1 / 50, "1/50 of the expert each"),
        codes_each(1 / 100, "1/100 of the expert each"),
        *([codes_together(0.3, "1.3× the base")] if count == 20 else []),
    )


def base_bytes(experts: TextExperts) -> int:
    """Bytes of a whole checkpoint."""
    return sum(tensor.nbytes for tensor in experts.base.values())


def measure(line: Line, experts: TextExperts, reference: Mapping[str, float]) -> dict[str, Any]:
    """Store the experts, rebuild and score them."""
    with tempfile.TemporaryDirectory() as directory:
        states, each = line.store(experts, Path(directory) / "stored")
        found = summary(experts.own_scores(states), reference)
    row = {"method": line.method, "setting": line.setting, "dtype": line.dtype, **sizes(experts, each), **found}
    print(
        f"{line.method + ' ' + line.setting:<30} {line.dtype:<9} {row['ratio']:6.2f}× the trained tensors, "
        f"{row['per_expert']:.3f} each, normalised {row['normalised']:.4f}",
        flush=True,
    )
    return row


def sizes(experts: TextExperts, each: Mapping[str, int]) -> dict[str, Any]:
    """What these bytes are of the trained tensors and of the base."""
    trained, base, nbytes = experts.trained_bytes, base_bytes(experts), sum(each.values())
    return {
        "bytes": nbytes,
        "ratio": (trained + nbytes) / trained,
        "per_expert": nbytes / len(experts.experts) / trained,
        "ratio_to_base": (base + nbytes) / base,
        "largest": max(size for name, size in each.items() if name != SHARED) / base,
    }


def kept_rows(path: Path | None, reference: Mapping[str, float]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of a stored file that were measured on the same experts and sentences: their scores as trained agree."""
    stored = json.loads(path.read_text())["results"] if path and path.exists() else {}
    if stored.get("experts") != dict(reference):
        return {}
    return {(row["method"], row["setting"], row["dtype"]): row for row in stored["rows"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, choices=TASK_SETS, default=8, help="number of experts")
    parser.add_argument("--test", type=int, default=500, help="test sentences of each task")
    parser.add_argument("--method", action="append", help="measure only lines of this method; may be repeated")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true", help="measure only the lines that the stored file lacks")
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    options = parser.parse_args(arguments)
    count = 4 if options.quick else options.tasks
    names, test = (TASKS[:4], 50) if options.quick else (TASK_SETS[count], options.test)
    lines = lines_for(count)[-1:] if options.quick else lines_for(count)
    experts = load_experts(options.cache, options.data, names, test=test, validation=0)
    reference = experts.own_scores(experts.experts)
    results: dict[str, Any] = {
        "sentences": {name: min(test, len(task.test)) for name, task in experts.tasks.items()},
        "trained_bytes": experts.trained_bytes,
        "base_bytes": base_bytes(experts),
        "experts": reference,
        "rows": [],
    }
    full = dict.fromkeys(names, experts.trained_bytes)
    kept = {"method": "experts as trained", "setting": "", "dtype": "float32"}
    results["rows"].append({**kept, **sizes(experts, full), **summary(reference, reference)})
    known = kept_rows(options.json, reference) if options.resume else {}
    for line in lines:
        name = (line.method, line.setting, line.dtype)
        if name in known:
            results["rows"].append(known[name])
        elif not options.method or line.method in options.method:
            results["rows"].append(measure(line, experts, reference))
        record(options.json, results, [0], added=options.resume)


if __name__ == "__main__":
    main()
