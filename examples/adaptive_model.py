"""Build one model that merges the right experts for every input (MASS over an expert library).

Digits of four kinds arrive mixed, without their task. A first pass finds the experts whose subspaces fit an input, and
a second pass runs through their merge. Needs scikit-learn for its digits.

    python examples/adaptive_model.py digit-experts
"""

import argparse
import copy
from collections import Counter
from pathlib import Path

import merganser as mg
from merganser.digits import Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, default=Path("digit-experts"))
    out = parser.parse_args().out

    digits = Digits()
    base = digits.train_base()
    experts = {task: digits.fine_tune(base, task) for task in digits.tasks}
    library = mg.library.Library.build(base, experts, out)
    merged = digits.from_state(library.merge().state_dict())
    # Leave out the last layer: its inputs tell the digits apart, not the kinds.
    adaptive = mg.routing.AdaptiveModel(copy.deepcopy(base), library, layer=["1", "3"], top=1)

    print(f"{'task':<10} expert  merged  adaptive  experts chosen")
    for task, expert in experts.items():
        images, labels = digits.test(task)
        routed = adaptive(images)
        answers = routed.logits.argmax(1)
        chosen = Counter("+".join(sorted(each)) for each in routed.sets)
        scores = digits.accuracy(expert, task), digits.accuracy(merged, task), float((answers == labels).float().mean())
        often = ", ".join(f"{name} {count / len(labels):.0%}" for name, count in chosen.most_common(2))
        print(f"{task:<10} {scores[0]:6.3f}  {scores[1]:6.3f}  {scores[2]:8.3f}  {often}")


if __name__ == "__main__":
    main()
