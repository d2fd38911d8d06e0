"""What `benchmarks.adaptive` counts: multiply-adds of requests, and bytes of the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.adaptive_accounting import Cost, measure, multiply_adds, stored
from benchmarks.adaptive_setting import Setting
from benchmarks.zoo.text import expert_directory
from merganser.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel
from merganser.routing.baselines import Baseline, Oracle
from merganser.routing.composition import applied
from merganser.routing.heads import Heads
from merganser.routing.sensitivity import accuracy

STEPS = ("first_pass", "router", "second_pass", "switch")
NOTHING = Cost(0, 0, 0, 0, 0)


def single_sentences(setting: Setting) -> Iterator[Inputs]:
    """Test sentences one by one without padding, tasks in turn."""
    streams = [
        [trimmed(x.select(torch.tensor([row]))) for x, labels in parts for row in range(len(labels))]
        for parts in setting.data.test.values()
    ]
    # Batches hold sentences of one length: a fixed shuffle mixes them.
    orders = [
        torch.randperm(len(stream), generator=torch.Generator().manual_seed(place)).tolist()
        for place, stream in enumerate(streams)
    ]
    for turn in range(max(map(len, streams))):
        for stream, order in zip(streams, orders, strict=True):
            if turn < len(order):
                yield stream[order[turn]]


def trimmed(x: Inputs) -> Inputs:
    assert x.mask is not None
    length = int(x.mask.sum())
    return Inputs((), {key: value[:, :length] for key, value in x.kwargs.items()})


def cost_rows(setting: Setting, model: AdaptiveModel, sentences: int) -> dict[str, Any]:
    """A stream of single sentences of all tasks with the default cache, empty at first: its first 32, its last 32, all
    of it; then whole batches of one task, routed on 4 probes, each met for the first time and for the second."""
    fresh = model.with_cache()
    stream = []
    for place, x in enumerate(single_sentences(setting)):
        if place == sentences:
            break
        stream.append(measure(fresh, x))
    rows = {
        "single_first 32": sum(stream[:32], NOTHING),
        "single_last 32": sum(stream[-32:], NOTHING),
        f"single_all {len(stream)}": sum(stream, NOTHING),
    }
    whole = model.with_cache().with_settings(per_batch=True, probes=4)
    for kind in ("batch_first", "batch_again"):
        rows[kind] = sum((measure(whole, parts[0][0]) for parts in setting.data.test.values()), NOTHING)
    return {kind: shares(cost) for kind, cost in rows.items()}


def set_rows(setting: Setting, model: AdaptiveModel, tokens: int = 20, largest: int = 3) -> list[dict[str, Any]]:
    """For sets of one expert, two, …: multiply-adds over a forward pass of one sentence of `tokens` tokens, the mean
    over all sets of that size. `beside` is the second pass with updates beside the layers, `switch` what a new set
    takes; `gram` and `eigen` are the shares of Gram matrices and of eigenproblems in that."""
    ones = torch.ones(1, tokens, dtype=torch.long)
    sentence = Inputs((), {"input_ids": ones, "attention_mask": ones})
    forward = multiply_adds(lambda: sentence.run(setting.encoder))[1]
    rows = []
    for size in range(1, min(largest, len(setting.library)) + 1):
        sets = list(combinations(setting.library.experts, size))
        row = dict.fromkeys(("beside", "switch", "bytes", "gram", "eigen"), 0.0)
        for chosen in sets:
            made = model.composer.compose(frozenset(chosen))
            with applied(setting.encoder, made):
                row["beside"] += multiply_adds(lambda: sentence.run(setting.encoder))[1] / forward
            row["switch"] += made.multiply_adds / forward
            row["bytes"] += made.nbytes
            for part in made.low_rank.values():
                rank = len(part.core)
                if part.core.dim() == 2:
                    sides = part.left[0].shape[0] + part.right[0].shape[0]
                    row["gram"] += sides * rank * (rank + 1) // 2 / forward
                    row["eigen"] += 9 * rank**3 / forward
        total = row["switch"]
        row = {key: value / len(sets) for key, value in row.items() if key not in ("gram", "eigen")} | {
            key: row[key] / total if total else 0.0 for key in ("gram", "eigen")
        }
        rows.append({"experts": size, "sets": len(sets), "tokens": tokens, **row})
        print(f"  sets of {size}: second pass {row['beside']:.2f}, switch {row['switch']:.2f}", flush=True)
    return rows


def shares(cost: Cost) -> dict[str, float]:
    return {step: getattr(cost, step) / cost.forward for step in STEPS} | {"ratio": cost.ratio}


def baseline_cost(baseline: Baseline, setting: Setting) -> float:
    """Multiply-adds of a baseline's own pass over those of a forward pass."""
    spent = plain = 0
    for parts in setting.data.test.values():
        x = parts[0][0]
        spent += multiply_adds(lambda x=x: baseline.run(x))[1]  # type: ignore[misc]
        plain += multiply_adds(lambda x=x: x.run(baseline.module))[1]  # type: ignore[misc]
    return spent / plain


def experts_kept(setting: Setting) -> float:
    """Normalised accuracy of the library's experts, each told its task: what compression leaves of them."""
    oracle = setting.baseline(Oracle)
    found = []
    for task, parts in setting.data.test.items():
        right = [len(labels) * accuracy(oracle.predict(x, task), task, labels) for x, labels in parts]
        found.append(sum(right) / sum(len(labels) for _, labels in parts) / setting.reference[task])
    return sum(found) / len(found)


def size_rows(setting: Setting, directory: Path, quick: bool) -> dict[str, Any]:
    """Bytes of the library with factors in several dtypes, and what is left of the experts at that size."""
    rows = {}
    for dtype in ("float32",) if quick else ("float32", "bfloat16", "int8"):
        library = setting.library
        if dtype != "float32":
            path = directory.with_name(f"{directory.name}-{dtype}")
            experts = {task: expert_directory(directory.parents[1], task) for task in library.experts}
            base = directory.parents[1] / "text" / "base"
            library = Library(path) if path.exists() else Library.build(base, experts, path, dtype=dtype)
        heads = Heads(setting.heads, library.experts)
        size = stored(library, sum(p.numel() for p in heads.parameters()))
        kept = experts_kept(replace(setting, library=library))
        rows[dtype] = asdict(size) | {"relative": size.relative, "relative_to_trained": size.relative_to_trained}
        rows[dtype]["told_normalised"] = kept
        print(
            f"stored, {dtype}: {size.relative:.2f}× the numbers of the base; {size.relative_to_trained:.2f}× the bytes "
            f"of the trained tensors; experts at {kept:.1%}",
            flush=True,
        )
    return rows
