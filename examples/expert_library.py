"""Keep many experts in about the space of two models: build a library, look at it, rebuild one, merge some.

Four experts for four kinds of digits (upright, flipped, turned, inverted). Needs scikit-learn for its digits.

    python examples/expert_library.py --out digit-experts
"""

import argparse
from pathlib import Path

import merganser as mg
from merganser.cli.digits import Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("digit-experts"))
    out = parser.parse_args().out

    digits = Digits()
    base = digits.train_base()
    experts = {task: digits.fine_tune(base, task) for task in digits.tasks}

    found = mg.experts.interference(base, experts)
    for advice in found.advice:
        print(f"{advice.kind}: {advice.text}")

    library = mg.experts.Library.build(base, experts, out)
    size = library.size()
    print(f"\n{len(experts)} experts and their base in {size.ratio:.2f}× the space of the base\n")

    merged = digits.from_state(library.merge().state_dict())
    print(f"{'task':<10} expert  rebuilt  merged")
    for task, expert in experts.items():
        rebuilt = digits.from_state(library.expert(task).state_dict())
        scores = [digits.accuracy(module, task) for module in (expert, rebuilt, merged)]
        print(f"{task:<10} {scores[0]:6.3f}  {scores[1]:7.3f}  {scores[2]:6.3f}")


if __name__ == "__main__":
    main()
