"""Average networks that were trained from different seeds: derive their symmetry, align them, repair the average.

The symmetry is derived from the module; no permutation table is needed. Needs scikit-learn for its digits.

    python examples/align_networks.py
"""

import argparse

import merganser as mg
from merganser.digits import Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=3)
    digits = Digits()
    networks = [digits.train_apart(seed) for seed in range(1, parser.parse_args().models + 1)]

    symmetry = mg.align.symmetry(networks[0], digits.example())
    print(symmetry, end="\n\n")
    universe = mg.align.universe(networks, symmetry)
    aligned = digits.from_state(universe.merged())
    repaired = mg.align.repair(aligned, [universe.to_universe(i) for i in range(len(universe))], [digits.example(200)])

    for seed, network in enumerate(networks, 1):
        print(f"trained with seed {seed}    {digits.accuracy(network, 'upright'):.3f}")
    print(f"plain average          {digits.accuracy(digits.from_state(mg.merge(networks)), 'upright'):.3f}")
    print(f"aligned average        {digits.accuracy(aligned, 'upright'):.3f}")
    print(f"aligned and repaired   {digits.accuracy(repaired, 'upright'):.3f}")
    print(f"cycle error            {universe.cycle_error():g}")


if __name__ == "__main__":
    main()
