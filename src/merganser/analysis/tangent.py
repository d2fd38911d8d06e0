"""The linearised (tangent-space) model f(x; θ0) + J_θ f(x; θ0) τ, through functional Jacobian-vector products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from merganser.errors import InputError
from merganser.modules.batches import InputsLike
from merganser.modules.functional import (
    Weights,
    call,
    check_weights,
    evaluation_copy,
    plain_attention,
    tensor_output,
)


def tangent(module: nn.Module, base: Weights, direction: Weights, inputs: InputsLike) -> tuple[Tensor, Tensor]:
    """Return f(x; base) and J_θ f(x; base) · direction in one forward pass; tensors without direction are constant.

    `module` should be in evaluation mode.

    Args:
        module: The network.
        base: The weights θ0.
        direction: The direction in weight space, by name.
        inputs: A batch of inputs.
    """
    moving = {name: value for name, value in direction.items() if base[name].is_floating_point()}
    point = {name: base[name].detach() for name in moving}
    fixed = {name: value for name, value in base.items() if name not in moving}
    return _jvp(lambda weights: call(module, {**fixed, **weights}, inputs), point, moving)


class TangentModel(nn.Module):
    """A module's linearisation at its weights, with the displacement τ as trainable parameters, initially zero.

    Fine-tune it like any module: the loss is then exactly a function of f(x; θ0) + Jτ, and `task_vector()` is the
    tangent-space task vector, which adds up without curvature (the model is linear in τ). The original is copied, not
    modified. A step costs about two to three of the original's.
    """

    def __init__(self, module: nn.Module, base: Weights | None = None) -> None:
        super().__init__()
        copied = evaluation_copy(module, base, "base").requires_grad_(False)
        trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        if not trainable:
            raise InputError("the module has no trainable parameter to linearise in")
        weights = dict(copied.named_parameters())
        self._linearised = (copied,)  # in a tuple, so that its weights are constants, not parameters of this module
        self._names = tuple(trainable)
        self.displacement = nn.ParameterList([torch.zeros_like(weights[name]) for name in trainable])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (module,) = self._linearised
        weights = dict(module.named_parameters())
        point = {name: weights[name] for name in self._names}
        direction = dict(zip(self._names, self.displacement, strict=True))

        def output(weights: Weights) -> Tensor:
            return tensor_output(functional_call(module, dict(weights), args, kwargs))

        value, derivative = _jvp(output, point, direction)
        return value + derivative

    def task_vector(self) -> dict[str, Tensor]:
        """Return τ by parameter name, as detached copies."""
        return {name: p.detach().clone() for name, p in zip(self._names, self.displacement, strict=True)}

    def load_task_vector(self, task_vector: Weights) -> TangentModel:
        """Set τ; missing names become zero."""
        check_weights(self._linearised[0], task_vector, "task vector")
        with torch.no_grad():
            for name, parameter in zip(self._names, self.displacement, strict=True):
                parameter.copy_(task_vector[name]) if name in task_vector else parameter.zero_()
        return self


def _jvp(function: Callable[[Weights], Tensor], point: Weights, direction: Weights) -> tuple[Tensor, Tensor]:
    with plain_attention():
        value, derivative = cast("tuple[Tensor, Tensor]", jvp(function, (point,), (direction,)))
    return value, derivative
