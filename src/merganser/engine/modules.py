"""Merge directly into a live module, whose class may name the tensors differently from the checkpoint."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from merganser.engine.plan import Output, Plan
from merganser.engine.sinks import PlacedSink
from merganser.errors import InputError


class ModuleTensors:
    """The tensors of a module by their names in a checkpoint, which may have or lack the module's base prefix."""

    def __init__(self, module: nn.Module) -> None:
        prefix = getattr(module, "base_model_prefix", "")
        self._state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self._prefix = f"{prefix}." if prefix else ""

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def __getitem__(self, name: str) -> Tensor:
        return self._state[str(self.find(name))].detach()

    def find(self, name: str) -> str | None:
        """Return the module's name of a tensor; None if it has no such tensor."""
        options = [name]
        if self._prefix:
            options += [self._prefix + name, name.removeprefix(self._prefix)]
        return next((option for option in options if option in self._state), None)

    def check(self, plan: Plan) -> None:
        """Check that every parameter of the module is filled with its shape."""
        given: dict[str | None, Output | None] = {self.find(alias): None for alias in plan.aliases}
        given |= {self.find(o.name): o for o in plan.outputs}
        tied = {tensor.data_ptr() for name, tensor in self._state.items() if name in given}
        for name, tensor in self._state.items():
            if name not in given and tensor.data_ptr() not in tied and isinstance(tensor, nn.Parameter):
                raise InputError(f"the merged checkpoint has no tensor for the module's {name!r}")
            output = given.get(name)
            if output is not None and tuple(tensor.shape) != output.spec.shape:
                raise InputError(
                    f"{name!r} is {tuple(tensor.shape)} in the module and {output.spec.shape} in the merge"
                )


class ModuleSink(PlacedSink):
    """Copies results into the parameters and buffers of a live module, which may have some outputs already."""

    def __init__(self, tensors: ModuleTensors, done: Collection[str] = ()) -> None:
        self._tensors = tensors
        self._done = done

    def done(self) -> Collection[str]:
        return self._done

    def place(self, output: Output) -> Tensor:
        return self._tensors[output.name].view(-1)
