"""Search for the weights of a merge with few evaluations, and score the winner on unseen images.

Three experts read upright, flipped and inverted digits, and each has forgotten some of what the others can read. Every
candidate answers a few questions (images of the three tasks), corrected by an IRT that was fitted to the answers of the
experts. At the end, the script says whether the winner is better than all of them. The study is a file:
kill the script and run it again, and it continues. Needs the `evolve` extra and scikit-learn.

    python examples/evolve_merge.py --study digits.sqlite
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import merganser as mg
from merganser.digits import Digits
from merganser.evolve import Design, Objective, Search, SearchParameter, Study, StudyTask
from merganser.evolve.summary import summarize

TASKS = ("upright", "flipped", "inverted")
ASKED = 30


class Examiner:
    """Answers questions about a candidate: for each task, which of the asked images it gets right."""

    def __init__(self) -> None:
        self.digits = Digits()
        self.base = self.digits.train_base()
        self.experts = {task: self.digits.fine_tune(self.base, task) for task in TASKS}
        self.single = {"base": self.base, **self.experts}
        self.questions = {task: self.digits.test(task) for task in TASKS}

    def __call__(
        self, candidate: str | Mapping[str, Any], items: Mapping[str, Sequence[int]]
    ) -> dict[str, list[float]]:
        network = self.single[candidate] if isinstance(candidate, str) else self.merged(candidate)
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
    parser.add_argument("--generations", type=int, default=6)
    options = parser.parse_args()

    examiner = Examiner()
    items = len(examiner.questions[TASKS[0]][1])
    design = Design(
        space={"weight": SearchParameter(0.0, 1.5, per="model")},
        tasks={task: StudyTask(items, subset=ASKED, estimator="gmp-irt") for task in TASKS},
        objectives=(Objective("mean", {task: 1 / len(TASKS) for task in TASKS}),),
        models={task: f"fine-tuned for {task} digits" for task in TASKS},
        base="trained on all digits",
        search=Search(population=10, generations=options.generations),
    )
    resumed = options.study.exists()
    study = Study.open(options.study)
    best = study.resume(examiner) if resumed else study.run(design, examiner)
    asked, pool = ASKED * len(TASKS), sum(task.pool for task in study.design.tasks.values())
    print(f"{len(study.trials())} candidates, {asked} questions each; {pool} would have been all")
    print("weights  ", {task: round(best.values[f"weight.{task}"], 3) for task in TASKS})

    summary = summarize(study)
    print(f"on unseen images: {'mean':>15}" + "".join(f"{task:>10}" for task in TASKS))
    for name, tested in {"winner": summary.winners[0], **summary.endpoints}.items():
        mean = f"{tested.objectives['mean']:.3f} ± {tested.objective_errors['mean']:.3f}"
        print(f"{name:<17}{mean:>16}" + "".join(f"{tested.test[task]:>10.3f}" for task in TASKS))
    print(summary.verdicts["mean"])


if __name__ == "__main__":
    main()
