"""Merge directly into a live module, whose class may name the tensors differently from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from merganser.engine.plan import Output, Plan
from merganser.engine.sinks import ModuleSink
from merganser.errors import InputError


class ModuleNames:
    """Maps checkpoint names to the module's names: equal, or with the module's base prefix added or removed."""

    def __init__(self, state: Mapping[str, Any], prefix: str) -> None:
        self._state = state
        self._prefix = f"{prefix}." if prefix else ""

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def find(self, name: str) -> str | None:
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


class RenamingSink(ModuleSink):
    """A sink into a module whose tensors are found through `names`."""

    def __init__(self, module: nn.Module, names: ModuleNames) -> None:
        super().__init__(module)
        self._found = names

    def place(self, output: Output) -> Tensor:
        flat: Tensor = self._targets[str(self._found.find(output.name))].view(-1)
        return flat
