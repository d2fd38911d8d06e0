"""Modules as functions of their weights: calls are functional, and the caller's module is never modified."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from merganser.errors import InputError, did_you_mean
from merganser.modules.batches import Batch, InputsLike, fitting, forward

Weights: TypeAlias = Mapping[str, Tensor]
WeightsScore: TypeAlias = Callable[[Weights], float]
"""From weights to a number, higher is better: an accuracy, or the negative of a loss."""
Head: TypeAlias = Callable[[Tensor], Tensor]
"""From a module's output to the logits of a task."""
LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""`loss(outputs, targets)`: the mean over the samples of a batch."""
Prepare: TypeAlias = Callable[[nn.Module], nn.Module]
"""Prepares a merged model for evaluation (REPAIR, or recomputed BatchNorm statistics); returns it or a copy."""


def evaluation_copy(module: nn.Module, weights: Weights | None = None, label: str = "state") -> nn.Module:
    """Return a copy in evaluation mode, with these weights if they are given: no dropout, no moving statistics, so
    that the loss is a function of the weights. `label` names the weights in messages.
    """
    copied = copy.deepcopy(module).eval()
    if weights is not None:
        check_state(copied, weights, label)
        copied.load_state_dict(dict(weights), strict=False)
    return copied


def prepare_module(module: nn.Module, prepare: Prepare | None) -> nn.Module:
    """Return the result of `prepare` for `module`, in evaluation mode; without it, the module itself."""
    found = module if prepare is None else prepare(module)
    if not isinstance(found, nn.Module):
        raise InputError(f"prepare must return the model to evaluate (the one it was given, or a copy), got {found!r}")
    return found.eval()


def plain_attention() -> AbstractContextManager[None]:
    """Use the plain attention kernel inside this context: the fused ones lack forward and second derivatives."""
    context: AbstractContextManager[None] = sdpa_kernel([SDPBackend.MATH])
    return context


def call(module: nn.Module, weights: Weights, inputs: InputsLike | Batch) -> Tensor:
    """Return f(inputs; weights), or its `.logits`; tensors that `weights` does not name come from `module`."""
    args, kwargs = fitting(module, inputs)
    return tensor_output(functional_call(module, untie(module, weights), args, kwargs))


def untie(module: nn.Module, weights: Weights) -> dict[str, Tensor]:
    """Return `weights` with each tied parameter once, under its name in `named_parameters`."""
    owners = {id(parameter): name for name, parameter in module.named_parameters()}
    aliases = {
        name: owners[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if owners[id(parameter)] != name
    }
    plain = {name: value for name, value in weights.items() if name not in aliases}
    return plain | {aliases[n]: v for n, v in weights.items() if n in aliases and aliases[n] not in plain}


def run(module: nn.Module, inputs: InputsLike | Batch) -> Tensor:
    """Return the output of `module` on `inputs` with its own weights, as one tensor."""
    return tensor_output(forward(module, inputs))


def tensor_output(output: Any) -> Tensor:
    """Return the tensor for a loss: the output itself, or its `logits`."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise InputError(
        f"the module returned {type(output).__name__}: expected a tensor or an object with a tensor `logits`; "
        "wrap the module so that it returns what the loss needs"
    )


def weights_of(model: nn.Module | Weights, label: str = "weights") -> Weights:
    """Return the state dict of a module, or the given one."""
    if isinstance(model, nn.Module):
        return {name: value.detach() for name, value in model.state_dict().items()}
    if not isinstance(model, Mapping):
        raise InputError(f"{label}: expected a module or its state dict, got a {type(model).__name__}")
    return model


def check_weights(module: nn.Module, weights: Weights, label: str = "weights") -> None:
    """Raise before any work if `weights` has tensors that `module` lacks or has in another shape."""
    if not isinstance(weights, Mapping):
        raise InputError(f"{label}: expected a state dict, got a {type(weights).__name__}; a module has a state_dict()")
    expected = module.state_dict(keep_vars=True)
    for name, value in weights.items():
        if name not in expected:
            raise InputError(f"{label}: {name!r} is not a tensor of the module{did_you_mean(name, expected)}")
        if value.shape != expected[name].shape:
            raise InputError(
                f"{label}: {name!r} has shape {tuple(value.shape)}, the module has {tuple(expected[name].shape)}"
            )


def check_state(module: nn.Module, state: Weights, label: str = "state") -> None:
    """Check as `check_weights`, and that every floating tensor of `module` is there, tied ones under at least one
    name.
    """
    check_weights(module, state, label)
    expected = module.state_dict(keep_vars=True)
    given = {id(expected[name]) for name in state}
    missing = [n for n, v in expected.items() if v.is_floating_point() and id(v) not in given]
    if missing:
        raise InputError(f"{label}: lacks {len(missing)} tensors of the module, such as {missing[0]!r}")


def combine(states: Sequence[Weights], coefficients: Sequence[float]) -> dict[str, Tensor]:
    """Return Σ c_i θ_i in float32 or wider; integer tensors are the first's. Inputs are not changed."""
    combined: dict[str, Tensor] = {}
    for name, first in states[0].items():
        if not (first.is_floating_point() or first.is_complex()):
            combined[name] = first.clone()
            continue
        wide = torch.promote_types(first.dtype, torch.float32)
        total = torch.zeros_like(first, dtype=wide)
        for state, coefficient in zip(states, coefficients, strict=True):
            if coefficient:
                total.add_(state[name].detach().to(wide), alpha=coefficient)
        combined[name] = total.to(first.dtype)
    return combined


@dataclass(frozen=True)
class FlatWeights:
    """The trainable parameters of a module as one vector, and as differentiable views of it."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> FlatWeights:
        """Return the layout of the parameters of `module` with `requires_grad`, tied ones once."""
        trainable = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError("the module has no trainable parameter")
        names, shapes = zip(*trainable, strict=True)
        return cls(names, shapes)

    @property
    def size(self) -> int:
        """Return the number of scalars."""
        return sum(shape.numel() for shape in self.shapes)

    def pack(self, weights: Weights) -> Tensor:
        """Return a new vector with `weights` in the order of `names`."""
        if missing := [name for name in self.names if name not in weights]:
            raise InputError(f"weights lack {missing[0]!r} ({len(missing)} in all)")
        return torch.cat([weights[name].detach().reshape(-1) for name in self.names])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views of `vector` under the parameters' names."""
        parts = torch.split(vector, [shape.numel() for shape in self.shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
