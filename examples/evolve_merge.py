"""Search for the weights of a merge with few evaluations, and score the winner on images nothing has seen.

Every candidate answers a few questions (images of two tasks), chosen and corrected by an IRT that was fitted to the
experts' answers. The study is a file: kill the program, run it again, and it goes on. Needs the `evolve` extra and
scikit-learn.

    python examples/evolve_merge.py --study digits.sqlite
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import merganser as mg
from merganser.cli.digits import Digits
from merganser.evolve import Design, Objective, Parameter, Range, Space, Study, Task

TASKS = ("upright", "inverted")


class Examiner:
    """Answers questions about a candidate: for each task, which of the asked images it gets right."""

    def __init__(self) -> None:
        self.digits = Digits()
        self.base = self.digits.train_base()
        self.experts = {task: self.digits.fine_tune(self.base, task) for task in TASKS}
        self.questions = {task: self.digits.test(task) for task in TASKS}

    def __call__(
        self, candidate: str | Mapping[str, Any], items: Mapping[str, Sequence[int]]
    ) -> dict[str, list[float]]:
        network = self.experts[candidate] if isinstance(candidate, str) else self.merged(candidate)
        answers = {}
        for task, asked in items.items():
            images, labels = self.questions[task]
            chosen = list(asked)
            with torch.inference_mode():
                right = network(images[chosen]).argmax(1) == labels[chosen]
            answers[task] = right.float().tolist()
        return answers

    def merged(self, values: Mapping[str, Any]) -> torch.nn.Module:
        weights = [values[f"weight.{task}"] for task in TASKS]
        state = mg.merge(self.experts, method="task_arithmetic", base=self.base, weight=weights)
        return self.digits.from_state(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", type=Path, default=Path("digits.sqlite"))
    parser.add_argument("--generations", type=int, default=5)
    options = parser.parse_args()

    examiner = Examiner()
    items = len(examiner.questions[TASKS[0]][1])
    design = Design(
        space=Space((Parameter("weight", Range(0.0, 1.5), models=TASKS),)),
        tasks=tuple(Task(task, items, subset=30, estimator="gmp-irt") for task in TASKS),
        objectives=(Objective("mean", dict.fromkeys(TASKS, 0.5)),),
        endpoints=TASKS,
        population=6,
        generations=options.generations,
    )
    resumed = options.study.exists()
    study = Study.open(options.study)
    best = study.resume(examiner) if resumed else study.run(design, examiner)
    print(f"{len(study.trials())} candidates, {2 * 30} questions each; {items * 2} would have been all")
    print("winner  ", {name: round(value, 3) for name, value in best.values.items()})
    for label in (best, *TASKS):
        scores = study.test_scores(label)
        name = label if isinstance(label, str) else "winner"
        print(f"{name:<9}", {task: round(scores[task], 3) for task in TASKS}, "on unseen images")


if __name__ == "__main__":
    main()
