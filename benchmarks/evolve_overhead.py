"""Processor time of a live study beside that of its questions: search, estimation and store, and merging."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.evolve_answers import Exam, Pool, Setting
from benchmarks.evolve_winners import NAME, Replay, task
from merganser.evolve import Calibration, Design, Objective, Search, Study
from merganser.evolve.costs import Event
from merganser.evolve.fitness import LiveMerge


@dataclass
class Timed:
    """A live evaluator that keeps the processor time of merging and of asking; of endpoints it knows the answers."""

    live: LiveMerge
    exam: Exam
    known: Replay
    merging: float = 0.0
    asking: float = 0.0
    searching: list[tuple[float, float, float]] = field(default_factory=list)

    def __call__(self, candidate: Any, items: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        if isinstance(candidate, str):
            return self.known(candidate, items)
        began = time.process_time()
        model = self.live.load(candidate)
        merged = time.process_time()
        with torch.inference_mode():
            answers = self.exam.asked(model, items[NAME])
        self.merging += merged - began
        self.asking += time.process_time() - merged
        return {NAME: answers}

    def listen(self, event: Event) -> None:
        """What was spent up to each event of the search, in all, on merging and on asking."""
        if event.phase == "search":
            self.searching.append((time.process_time(), self.merging, self.asking))


def measure_overhead(
    setting: Setting, pool: Pool, exam: Exam, size: int, population: int, generations: int
) -> dict[str, Any]:
    """CPU seconds per trial of a live study at n = `size` with gmp-IRT, and of a copy of the model's weights."""
    timed = Timed(exam.live(), exam, Replay(dict(zip(setting.experts, pool.endpoints(setting), strict=True))))
    timed.live.load(setting.grid[0])
    design = Design(
        space=setting.space.parameters,
        tasks={NAME: task(pool, "gmp-irt", size)},
        objectives=(Objective.of(NAME),),
        models=dict.fromkeys(setting.experts, ""),
        search=Search(population=population, generations=generations, rerank=0),
    )
    with tempfile.TemporaryDirectory() as folder:
        study = Study.open(Path(folder, "study.sqlite"))
        calibration = {NAME: Calibration(answers=pool.calibration(setting))}
        study.run(design, timed, calibration=calibration, on_event=timed.listen)
        evaluated = sum(t.state == "done" and t.cached_from is None for t in study.trials())
        trials = len(study.trials())
        study.close()
    total, merging, asking = np.subtract(timed.searching[-1], timed.searching[0]).tolist()
    machinery, merging, asking = (total - merging - asking) / trials, merging / evaluated, asking / evaluated
    began = time.process_time()
    with torch.inference_mode():
        exam.answers(timed.live.module)
    full = time.process_time() - began
    copying = copy_seconds(timed.live.module)
    return {
        "n": size,
        "trials": trials,
        "evaluated": evaluated,
        "machinery": machinery,
        "merging": merging,
        "copying": copying,
        "merging_over_copying": merging / copying,
        "merging_over_asking": merging / asking,
        "merging_over_asking_full": merging / full,
        "asking": asking,
        "asking_full": full,
        "machinery_over_asking": machinery / asking,
        "machinery_and_merging_over_asking": (machinery + merging) / asking,
        "machinery_over_asking_full": machinery / full,
        "machinery_and_merging_over_asking_full": (machinery + merging) / full,
    }


def copy_seconds(module: nn.Module, repeats: int = 5) -> float:
    """Processor time of one copy of all parameters into memory that is there already."""
    sources = [parameter.detach() for parameter in module.parameters()]
    targets = [torch.empty_like(source).copy_(source) for source in sources]
    began = time.process_time()
    for _ in range(repeats):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
    return (time.process_time() - began) / repeats
