"""Check whether a self-test could have failed: whether weights and inputs affect the outputs at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from merganser.align.symmetries import Symmetry
from merganser.errors import InputError
from merganser.modules.batches import Arguments

Run = Callable[[Arguments], list[Tensor]]


def find_ineffective(run: Run, example: Arguments, weights: Mapping[str, Tensor], rtol: float) -> set[str]:
    """Return the weights w whose effect max |w| · max |∂L/∂w| is below `rtol`, for a random combination L of outputs.

    Gradients are checked and dropped one by one. A weight without a derivative counts as having an effect.
    """
    effects: dict[int, float] = {}

    def note(weight: Tensor) -> None:
        assert weight.grad is not None
        effects[id(weight)] = max(
            effects.get(id(weight), 0.0), _find_largest(weight.grad) * _find_largest(weight.detach())
        )
        weight.grad = None

    once = {id(weight): weight for weight in weights.values() if weight.is_floating_point() or weight.is_complex()}
    handles = [
        weight.requires_grad_().register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        for weight in once.values()
    ]
    try:
        with torch.enable_grad():
            outputs = [value for value in run(example) if value.requires_grad]
            if outputs:
                _combine_outputs(outputs).backward()  # type: ignore[no-untyped-call]
    except (InputError, RuntimeError):
        return set()
    finally:
        for handle in handles:
            handle.remove()
        for weight in once.values():
            weight.requires_grad_(False)
            weight.grad = None
    return {name for name, weight in weights.items() if id(weight) in once and effects.get(id(weight), 0.0) <= rtol}


def _find_largest(tensor: Tensor) -> float:
    """Return max |x|, without a copy of the tensor."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return max((abs(float(end)) for end in real.aminmax()), default=0.0) if real.numel() else 0.0


def _combine_outputs(outputs: list[Tensor]) -> Tensor:
    """Return a random linear combination of outputs, each on its own scale."""
    generator = torch.Generator().manual_seed(0)
    terms = []
    for value in outputs:
        draw = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        terms.append((value * draw).sum() / value.detach().abs().max().clamp_min(1e-30))
    return torch.stack(terms).sum()


def find_untested_atoms(
    run: Run, example: Arguments, symmetry: Symmetry, state: Mapping[str, Tensor], rtol: float
) -> list[str]:
    """Return the atoms without a weight that affects the outputs.

    The smallest weight of every atom is tried first and usually suffices: gradients of large ones cost memory.
    """
    places = {
        atom: sorted(dict.fromkeys(n for n, _ in found), key=lambda n: state[n].numel())
        for atom, found in symmetry.occurrences.items()
    }
    left = [atom for atom, names in places.items() if names]
    for most in (1, None):
        names = {name for atom in left for name in places[atom][:most]}
        silent = find_ineffective(run, example, {name: state[name] for name in names}, rtol) if names else set()
        left = [atom for atom in left if silent.issuperset(places[atom][:most])]
    return left


def ignores_inputs(run: Run, example: Arguments, expected: list[Tensor], rtol: float) -> bool:
    """Return whether other inputs give the same outputs: floats are redrawn, integers mirrored in their range.

    Returns False if inputs cannot be changed (a constant integer, a mask) or fail when changed.
    """
    generator = torch.Generator().manual_seed(0)

    def change(tensor: Tensor) -> Tensor:
        if tensor.numel() == 0 or tensor.dtype == torch.bool:
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
            return tensor + noise.to(tensor.dtype)
        return tensor.min() + tensor.max() - tensor

    other: Any = tree_map_only(torch.Tensor, change, example)
    before, after = ([t for t in tree_leaves(value) if isinstance(t, Tensor)] for value in (example, other))
    if all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        return False
    try:
        found = run(other)
    except (InputError, IndexError):
        return False
    return len(found) == len(expected) and all(
        relative_difference(a, b) <= rtol for a, b in zip(expected, found, strict=True)
    )


def relative_difference(expected: Tensor, found: Tensor) -> float:
    """Return max |expected − found| / max |expected|; infinite for tensors of different shapes."""
    if expected.shape != found.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-30))
