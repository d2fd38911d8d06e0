"""Store many experts in the space of two models: build a library, inspect it, rebuild its experts, merge them.

Four experts read four kinds of digits (upright, flipped, turned, inverted). The files of all experts together may
take as much space as one model, or another share of it (--budget). The script shows what this costs in accuracy.
Needs scikit-learn for its digits.

    python examples/expert_library.py digit-experts
    python examples/expert_library.py digit-experts-small --budget 0.05
"""

import argparse
from pathlib import Path

import merganser as mg
from merganser.digits import Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, default=Path("digit-experts"))
    parser.add_argument("--budget", type=float, default=1.0, help="space for all experts, in models")
    options = parser.parse_args()

    digits = Digits()
    base = digits.train_base()
    experts = {task: digits.fine_tune(base, task) for task in digits.tasks}

    found = mg.interference.survey(base, experts)
    for advice in found.advice:
        print(f"{advice.kind}: {advice.text}")

    model = sum(tensor.nbytes for tensor in base.state_dict().values())
    library = mg.library.Library.build(base, experts, options.out, budget=int(options.budget * model))
    count, ratio = len(experts), library.size().ratio
    print(f"\n{count} experts and their base in {ratio:.2f}× the space of the base, instead of {1 + count}×\n")

    merged = digits.from_state(library.merge().state_dict())
    print(f"{'task':<10}  base  expert  rebuilt  merged  energy kept, all tensors together")
    scores = []
    for task, expert in experts.items():
        rebuilt = digits.from_state(library.expert(task).state_dict())
        scores.append([digits.accuracy(module, task) for module in (base, expert, rebuilt, merged)])
        print(_line(task, scores[-1]), f" {library.manifest.experts[task].energy:.1%}")
    means = [sum(column) / len(scores) for column in zip(*scores, strict=True)]
    print(_line("mean", means))
    kept, merging = means[2] / means[1], means[3] / means[1]
    print(f"\nof the experts' accuracy, rebuilding them keeps {kept:.1%}, merging them into one {merging:.1%}")


def _line(name: str, scores: list[float]) -> str:
    base, expert, rebuilt, merged = scores
    return f"{name:<10} {base:.3f}  {expert:6.3f}  {rebuilt:7.3f}  {merged:6.3f}"


if __name__ == "__main__":
    main()
