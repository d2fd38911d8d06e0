"""What an alignment has achieved: similarity and loss barriers of its models, before and after.

The functions return plain values; `merganser align` stores them as `alignment.json`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from merganser.align.permutations import identity
from merganser.align.solver import objective_of
from merganser.align.universes import Universe
from merganser.analysis.landscape import plane, segment
from merganser.analysis.similarity import weight_similarity
from merganser.errors import InputError
from merganser.modules.batches import Batch

#: Points of a segment, and of each side of a plane, at which the loss is measured.
POINTS = 11


def compare_weights(universe: Universe, names: Sequence[str]) -> dict[str, Any]:
    """Compare the weights of the models of a universe, before and after they were aligned.

    Args:
        universe: The universe.
        names: Names of its models, in their order.

    Returns:
        The numbers of atoms and of tensors that they move, the objective, the cosine and the distance of every pair,
        and what to doubt.

    Example:
        >>> found = compare_weights(mg.align.universe(models, symmetry), "abc")  # doctest: +SKIP
        >>> found["pairs"][0]["cosine"]  # doctest: +SKIP
        {'before': 0.02, 'after': 0.61}
    """
    symmetry = universe.symmetry

    def untied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in state.items() if name not in symmetry.aliases}

    before = weight_similarity({name: untied(universe.models[i]) for i, name in enumerate(names)})
    after = weight_similarity({name: untied(universe.to_universe(i)) for i, name in enumerate(names)})
    untouched = objective_of(universe.models, [identity(symmetry)] * len(universe), symmetry)
    return {
        "models": list(names),
        "atoms": len(symmetry.atoms),
        "tensors": len(symmetry.objective),
        "objective": {"before": untouched, "after": universe.objective},
        "cycle_error": universe.cycle_error(),
        "pairs": [
            {
                "models": [names[a], names[b]],
                "cosine": {"before": before.cosine[a][b], "after": after.cosine[a][b]},
                "distance": {"before": before.distance[a][b], "after": after.distance[a][b]},
            }
            for a, b in itertools.combinations(range(len(names)), 2)
        ],
        "notes": list(universe.notes),
        "running_statistics": any(name.endswith("running_var") for name in symmetry.buffers),
    }


def compare_losses(
    universe: Universe, names: Sequence[str], network: nn.Module, batches: Sequence[Batch]
) -> dict[str, Any]:
    """Measure the loss between every two models of a universe, and over the plane of the first three.

    Args:
        universe: The universe.
        names: Names of its models, in their order.
        network: A module of their architecture; it is not changed.
        batches: Labelled batches `(inputs, targets)`.

    Returns:
        The segments and, of three models that are not on one line, the plane, before and after alignment.

    Example:
        >>> compare_losses(universe, "abc", network, batches)["segments"]  # doctest: +SKIP
    """
    spaces = {"before": universe.models, "after": [universe.to_universe(i) for i in range(len(universe))]}
    found: dict[str, Any] = {
        "segments": [
            {"models": [names[a], names[b]]}
            | {
                when: segment(network, states[a], states[b], batches, mean_loss, points=POINTS).to_dict()
                for when, states in spaces.items()
            }
            for a, b in itertools.combinations(range(len(names)), 2)
        ]
    }
    if len(names) > 2:
        with contextlib.suppress(InputError):  # models on one line, such as copies, have no plane
            found["plane"] = {"models": list(names[:3])} | {
                when: plane(network, states[:3], batches, mean_loss, resolution=POINTS).to_dict()
                for when, states in spaces.items()
            }
    return found


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy for targets that are classes, else the mean squared error.

    Args:
        outputs: The outputs of a network.
        targets: Their targets.
    """
    if targets.is_floating_point():
        return functional.mse_loss(outputs, targets)
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
