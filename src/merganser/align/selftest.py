"""The proof of a derivation: random weights, permuted at random, must compute the same function in float64."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from merganser.align.permutations import Permutations, apply, identity, random
from merganser.align.symmetries import Symmetry
from merganser.batches import Inputs, arguments
from merganser.errors import InputError, MerganserError

RTOL = 1e-9
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _Double(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts to a narrower float become casts to float64: some models compute parts of themselves in float32."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def widen(dtype: torch.dtype) -> torch.dtype:
            return torch.float64 if dtype in _NARROW else dtype

        return func(*tree_map_only(torch.dtype, widen, args), **tree_map_only(torch.dtype, widen, kwargs or {}))


def self_test(
    module: torch.nn.Module,
    symmetry: Symmetry,
    example_inputs: Inputs,
    *,
    kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    rtol: float = RTOL,
) -> float:
    """The largest relative difference of outputs under a random cycle of every atom; raises above `rtol`.

    Every weight is perturbed first: zero biases, unit gains and fresh BatchNorm statistics hide mistakes.
    Inputs are as for `symmetry`. The module should be in evaluation mode; it is not changed.
    """
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise InputError("weights on the meta device cannot be self-tested: derive with self_test=False")
    args, own = arguments(example_inputs)
    named = {**own, **(kwargs or {})}
    state, rest = random_weights(module, seed)
    expected = _outputs(module, {**state, **rest}, args, named)
    if not any(value.numel() for value in expected):
        raise InputError("the self-test is inconclusive: the example inputs give no outputs to compare")
    if not all(torch.isfinite(value).all() for value in expected):
        raise InputError("the self-test is inconclusive: the example inputs give outputs that are not finite")

    def difference(permutations: Permutations) -> float:
        moved = apply(symmetry, permutations, state)
        outputs = _outputs(module, {**moved, **rest}, args, named)
        return max(_relative(a, b) for a, b in zip(expected, outputs, strict=True))

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
    return worst


def cycles(symmetry: Symmetry, seed: int = 0) -> Permutations:
    """A random cycle through all units for every atom: unlike a random permutation, it leaves none in place."""
    result: Permutations = {}
    for name, order in random(symmetry, seed).items():
        result[name] = np.empty_like(order)
        np.put_along_axis(result[name], order, np.roll(order, 1, axis=-1), axis=-1)
    return result


def random_weights(module: torch.nn.Module, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(state dict, remaining buffers) in float64, perturbed on their own scale; tied tensors stay tied."""
    generator = torch.Generator().manual_seed(seed)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    drawn: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            if isinstance(tensor, torch.Tensor):
                state[name] = tensor.detach()
            continue
        if (key := tensor.data_ptr()) not in drawn or drawn[key].shape != tensor.shape:
            drawn[key] = _perturbed(name, tensor.detach().double(), name in buffers, generator)
        state[name] = drawn[key]
    rest = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in buffers.items()
        if name not in state
    }
    return state, rest


def _perturbed(name: str, tensor: torch.Tensor, is_buffer: bool, generator: torch.Generator) -> torch.Tensor:
    noise = torch.rand(tensor.shape, generator=generator).to(tensor.device).double().sub_(0.5)
    if name.endswith("running_var") or (is_buffer and not name.endswith("running_mean")):
        return noise.add_(1).mul_(tensor)  # stays positive; a mask of −∞ and 0 stays one
    scale = float(torch.linalg.vector_norm(tensor)) / max(tensor.numel(), 1) ** 0.5
    return noise.mul_(max(scale, 0.05)).add_(tensor)


def _outputs(
    module: torch.nn.Module, weights: Mapping[str, torch.Tensor], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    def double(value: torch.Tensor) -> torch.Tensor:
        return value.double() if value.is_floating_point() else value

    given = tuple(tree_map_only(torch.Tensor, double, tuple(args)))
    named = dict(tree_map_only(torch.Tensor, double, dict(kwargs)))
    try:
        with torch.no_grad(), _Double():  # type: ignore[no-untyped-call]
            result = functional_call(module, dict(weights), given, named, tie_weights=False)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be self-tested, it does not run in float64: {error}; "
            "derive with self_test=False if you trust the derivation"
        ) from error
    leaves = tree_flatten(result)[0]
    return [leaf.double() for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_complex()]


def _relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return float(np.inf)
    if expected.numel() == 0:
        return 0.0
    return float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-30))
