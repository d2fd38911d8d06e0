"""Memory of a study's workers, and what asking candidates in fewer bits changes, on real language models.

    python -m benchmarks.evolve_memory --base STORIES [--workers 1 2] [--quick] [--json FILE]

Workers hold the base and two fine-tunes of stories15M as memory maps, and each a network of its own. After they have
evaluated merges, the kernel's proportional set sizes are read: pages that several processes share count once in their
sum. Then base, fine-tunes and their uniform merge are asked the same held-out items in full precision, int8 and nf4
(extra `quantize`), so that differences are paired.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.evolve_costs import Setting, load_setting
from benchmarks.measuring import field
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.language_skills import SKILLS
from merganser.evolve.design import BASE
from merganser.evolve.intervals import paired_interval
from merganser.evolve.objectives import Objective
from merganser.evolve.quantization import Quantization
from merganser.evolve.workers import Job, Processes

FORMS = ("int8", "nf4")


def mapped(pid: int, files: Sequence[Path]) -> tuple[int, int]:
    """Return bytes of a process's pages of these files: resident, and its proportion of them. Pages of a private map
    that were written are copies, and no pages of the file.
    """
    sizes = {"Rss:": 0, "Pss:": 0, "Anonymous:": 0}
    names, mine = {str(file.resolve()) for file in files}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            mine = line.split(maxsplit=5)[-1] in names
        elif mine and key in sizes:
            sizes[key] += int(rest[0]) * 1024
    return sizes["Rss:"] - sizes["Anonymous:"], sizes["Pss:"] - sizes["Anonymous:"]


def measure_memory(setting: Setting, count: int, items: int) -> dict[str, int]:
    """Return the memory of a study's process and its `count` workers after they have evaluated merges."""
    files = [path / "model.safetensors" for path in (setting.base, *setting.experts.values())]
    asked = {name: range(items) for name in setting.experts}
    values = [{v.name: 0.2 + 0.1 * number for v in setting.space.variables} for number in range(4 * count)]
    pool = Processes(setting.evaluator(), count)
    try:
        outcomes = list(pool.run([Job(number, each, asked) for number, each in enumerate(values)]))
        pids = {int(outcome.worker) for outcome in outcomes}
        if len(pids) != count or any(outcome.error for outcome in outcomes):
            raise RuntimeError(f"{len(pids)} of {count} workers: {[outcome.error for outcome in outcomes]}")
        pids.add(os.getpid())
        resident, shared = (sum(sizes) for sizes in zip(*(mapped(pid, files) for pid in pids), strict=True))
        own = sum(field(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:") for pid in pids)
    finally:
        pool.close()
    size = sum(file.stat().st_size for file in files)
    return {"workers": count, "files": size, "resident": resident, "endpoints": shared, "private": own}


def copy_models(setting: Setting, folder: Path) -> Setting:
    """Copy the models, so that no other process of the machine shares their pages."""
    models = {"base": setting.base, **setting.experts}
    copies = {name: Path(shutil.copytree(path, folder / name)) for name, path in models.items()}
    return replace(setting, base=copies.pop("base"), experts=copies)


def measure_precision(setting: Setting) -> dict[str, Any]:
    """Return scores in full precision and in each form, and how much better each form is, item by item."""
    exact = setting.evaluator()
    items = {name: range(len(examiner)) for name, examiner in setting.examiners.items()}
    merge = {variable.name: 0.5 for variable in setting.space.variables}
    candidates: dict[str, Any] = {BASE: BASE, **{label: label for label in setting.experts}, "uniform merge": merge}
    objective = Objective("mean", {name: 1 / len(items) for name in items})
    rows: dict[str, Any] = {form: {} for form in FORMS}
    seconds = dict.fromkeys(("full", *FORMS), 0.0)
    evaluators = {"full": exact, **{form: replace(exact, quantize=Quantization(form)) for form in FORMS}}
    for evaluator in evaluators.values():  # imports, loading and the first copy
        evaluator(merge, {name: range(4) for name in items})
    for label, candidate in candidates.items():
        answers: dict[str, dict[str, np.ndarray]] = {}
        for form, evaluator in evaluators.items():
            began = time.process_time()
            answers[form] = {name: np.array(values) for name, values in evaluator(candidate, items).items()}
            seconds[form] += time.process_time() - began
        for form in FORMS:
            rows[form][label] = {
                "full": float(np.mean([answers["full"][name].mean() for name in items])),
                "score": float(np.mean([answers[form][name].mean() for name in items])),
                "bias": asdict(paired_interval(objective, answers[form], answers["full"])),
                "changed": float(np.mean([answers[form][name] != answers["full"][name] for name in items])),
            }
    return {"forms": rows, "seconds": seconds, "items": sum(map(len, items.values()))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="stories15M, as `benchmarks.zoo.stories` writes it")
    parser.add_argument("--skills", nargs="+", choices=SKILLS, default=["questions", "intents"])
    parser.add_argument("--items", type=int, default=300, help="of each skill")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="20 items of each skill")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_locations(parser)
    options = parser.parse_args(arguments)
    options.items = 20 if options.quick else options.items
    options.pool, options.population, options.generations = options.items // 2, 6, 1
    torch.set_num_threads(1)
    setting = load_setting(options, "task_arithmetic")
    memory: list[Mapping[str, int]] = []
    for count in options.workers:
        memory.append(measure_memory(setting, count, 10))
        print(
            {key: f"{value / 2**20:.1f} MiB" if value > 99 else value for key, value in memory[-1].items()}, flush=True
        )
    precision = measure_precision(setting)
    for form, row in precision["forms"].items():
        for label, each in row.items():
            print(form, label, each, flush=True)
    print(precision["seconds"])
    record(options.json, {"memory": memory, "precision": precision, "skills": options.skills}, [0])


if __name__ == "__main__":
    main()
