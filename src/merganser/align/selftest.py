"""The self-test of a derivation: random weights, permuted at random, must compute the same function in float64."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from merganser.align.double_precision import call_in_double, random_weights
from merganser.align.execution import example_arguments, plain_kernels
from merganser.align.outputs import Outputs, choose
from merganser.align.permutations import Permutations, identity, inverse, permute_, random
from merganser.align.sensitivity import find_untested_atoms, ignores_inputs, relative_difference
from merganser.align.symmetries import Symmetry
from merganser.errors import InputError, MerganserError
from merganser.excerpts import list_some
from merganser.modules.batches import Arguments, InputsLike

logger = logging.getLogger(__name__)

RTOL = 1e-9


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test: it passed, or was inconclusive because a mistake would not have shown.

    Attributes:
        difference: The largest relative difference of outputs under a random cycle of every atom.
        untested: Atoms none of whose weights has an effect on the outputs of this example.
        ignores_inputs: Whether the outputs are the same for other inputs.
    """

    difference: float
    untested: tuple[str, ...] = ()
    ignores_inputs: bool = False

    @property
    def verdict(self) -> Literal["passed", "inconclusive"]:
        return "inconclusive" if self.untested or self.ignores_inputs else "passed"


@torch.inference_mode(False)  # which weights have an effect is told by gradients
def self_test(
    module: nn.Module,
    symmetry: Symmetry,
    example_inputs: InputsLike,
    *,
    kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs | None = None,
    seed: int = 0,
    rtol: float = RTOL,
) -> SelfTest:
    """Permute random weights by a random cycle of every atom and compare outputs in float64.

    Every weight is perturbed first: zero biases, unit gains and fresh BatchNorm statistics hide mistakes. Each forward
    pass runs on a fresh copy of the module in evaluation mode, on one float64 copy of the weights.

    Args:
        module: The network; it is not changed.
        symmetry: The symmetry to test.
        example_inputs: As for `symmetry`.
        kwargs: More keyword arguments of the forward pass.
        outputs: The outputs to compare, as for `symmetry`.
        seed: The seed of the weights and the permutations.
        rtol: The largest relative difference that passes.

    Returns:
        The difference and the verdict, "passed" or "inconclusive".

    Raises:
        MerganserError: If outputs differ by more than `rtol`.
        InputError: If the module cannot be tested: it does not run in float64, or its outputs are empty or not finite.

    Example:
        >>> mg.align.self_test(base, mg.align.symmetry(base, images), images).verdict
        'passed'
    """
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise InputError("weights on the meta device cannot be self-tested: derive with self_test=False")
    example = example_arguments(module, example_inputs, kwargs)
    state, rest = random_weights(module, symmetry, seed)

    def run(inputs: Arguments) -> list[Tensor]:
        returned = choose(call_in_double(module, {**state, **rest}, inputs), outputs)
        return [torch.view_as_real(v.resolve_conj()) if v.is_complex() else v.double() for v in returned]

    def difference(permutations: Permutations) -> float:
        permute_(symmetry, permutations, state)
        found = run(example)
        permute_(symmetry, inverse(symmetry, permutations), state)
        return max(relative_difference(a, b) for a, b in zip(expected, found, strict=True))

    with plain_kernels(), torch.no_grad():
        expected = run(example)
        if not any(value.numel() for value in expected):
            raise InputError("the self-test is inconclusive: the example inputs give no outputs to compare")
        if not all(torch.isfinite(value).all() for value in expected):
            raise InputError("the self-test is inconclusive: the example inputs give outputs that are not finite")
        state.update(symmetry.canonical.of(state))
        everything = cycles(symmetry, seed)
        worst = difference(everything)
        if not worst <= rtol:
            still = identity(symmetry)
            guilty = [name for name in symmetry.atoms if not difference({**still, name: everything[name]}) <= rtol]
            raise MerganserError(
                f"the derived symmetry of {type(module).__name__} failed its self-test: outputs differ by {worst:.1e} "
                f"(relative, limit {rtol:.0e}) when permuting {', '.join(guilty) or 'all atoms at once'}; "
                "derive with self_test=False and .pin() these atoms to go on without them"
            )
        untested = find_untested_atoms(run, example, symmetry, state, rtol)
        return SelfTest(worst, tuple(untested), bool(symmetry.atoms) and ignores_inputs(run, example, expected, rtol))


def prove(
    module: nn.Module,
    symmetry: Symmetry,
    examples: Sequence[Arguments],
    *,
    outputs: Outputs | None = None,
    seed: int = 0,
) -> None:
    """Self-test on every example; refuse a symmetry that none can test, and warn about atoms that none tests.

    Raises:
        InputError: If no example can distinguish right from wrong permutations.
    """
    results = [self_test(module, symmetry, a, kwargs=k, outputs=outputs, seed=seed) for a, k in examples]
    untested = [name for name in symmetry.atoms if all(name in result.untested for result in results)]
    name = type(module).__name__
    if symmetry.atoms and (len(untested) == len(symmetry.atoms) or all(r.ignores_inputs for r in results)):
        what = "the weights that move" if len(untested) == len(symmetry.atoms) else "the inputs"
        raise InputError(
            f"the self-test of {name} is inconclusive: its outputs do not depend on {what}, so that a mistake could "
            "not show; give other example inputs or a larger network, or derive with self_test=False"
        )
    if untested:
        logger.warning(
            "the self-test of %s is inconclusive for %s: no example input uses these weights; give more_examples that "
            "do, or .pin() them",
            name,
            list_some(untested, 5),
        )


def cycles(symmetry: Symmetry, seed: int = 0) -> Permutations:
    """Return a random cycle through all units of every atom, which leaves none in place."""
    result: Permutations = {}
    for name, order in random(symmetry, seed).items():
        result[name] = order if symmetry.atoms[name].group != "permutation" else np.empty_like(order)
        if symmetry.atoms[name].group == "permutation":
            np.put_along_axis(result[name], order, np.roll(order, 1, axis=-1), axis=-1)
    return result
