"""A live module that is updated from one merge to the next by computing only the differences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from merganser.checkpoints.base import Checkpoint
from merganser.engine.compute import Arithmetic
from merganser.engine.execute import execute
from merganser.engine.kept import Kept
from merganser.engine.merge import Merge
from merganser.engine.modules import ModuleSink, ModuleTensors
from merganser.engine.plan import Output
from merganser.engine.ranges import NARROW
from merganser.errors import InputError
from merganser.methods.base import Thinning
from merganser.methods.registry import lookup

Mark = tuple[Any, ...]


class LiveModule:
    """A module with the weights of the merge that was loaded last.

    `load` computes the tensors whose method, sources or parameters changed since the previous load, with the engine's
    own arithmetic: the same recipe written to disk has the same weights, bit for bit.

    Args:
        module: The network to fill; the checkpoint's names may have or lack its base prefix.
        finite: Whether the sources are known to be finite, so that loads need not check them.
        room: The number of bytes in which thinned task vectors are kept, so that the next weight does not trim or
            draw again. They need four bytes for each parameter of each model.

    Example:
        >>> live = LiveModule(AutoModelForCausalLM.from_pretrained("base"))
        >>> changed = live.load(mg.recipes.prepare(mg.recipes.load("recipe.yml")))
    """

    def __init__(self, module: nn.Module, *, finite: bool = False, room: int = 0) -> None:
        self.module = module
        self.finite = finite
        self._loaded: dict[str, Mark] = {}
        self._same: dict[tuple[Any, ...], bool] = {}
        self._kept = Kept(room)
        self._first: Checkpoint | None = None

    @property
    def held(self) -> int:
        """The number of bytes in which task vectors are kept; at most `room`."""
        return self._kept.held

    def load(self, merge: Merge, workers: int | None = None) -> list[Output]:
        """Fill the module with a merge.

        Args:
            merge: The merge; its sources should be the same objects as in the loads before.
            workers: The number of threads; by default one per core.

        Returns:
            The outputs that were computed.

        Raises:
            InputError: If the merge does not fill the module, or contains a nested recipe.
        """
        plan, tensors = merge.plan, ModuleTensors(self.module)
        tensors.check(plan)
        if nested := [model.label for model in plan.models if model.plan is not None]:
            raise InputError(
                f"{nested[0]}: a nested recipe cannot be merged in memory; merge it first and name the result"
            )
        if self._first is None:
            self._first = merge.sources[0]
        marks = self._marks(merge, tensors)
        changed = [o for o in plan.outputs if o.name in marks and self._loaded.get(o.name) != marks[o.name]]
        if changed:
            names = {output.name for output in changed}
            kept = {o.name for o in plan.outputs} - names
            self._loaded = {name: mark for name, mark in self._loaded.items() if name not in names}
            # If the sources are known to be finite, check only what may overflow.
            unchecked = self.finite and not any(o.spec.element.name in NARROW for o in changed)
            if not any(_thins(merge, output) for output in plan.outputs):
                self._kept.forget_vectors()
            settings = Arithmetic(allow_nan=unchecked, kept=self._kept)
            with torch.no_grad():
                execute(merge, ModuleSink(tensors, kept), workers=workers, settings=settings)
            self._loaded = marks
        return changed

    def _marks(self, merge: Merge, tensors: ModuleTensors) -> dict[str, Mark]:
        """Return a mark per output that the module has, such that equal marks mean equal tensors: how it is made, or
        that it is the base's.
        """
        plan = merge.plan
        on_deltas = {method: lookup(method).base == "required" for method in {o.method for o in plan.outputs}}
        shared = {id(output.parameters): output.parameters for output in plan.outputs}
        told = {key: json.dumps(dict(given), sort_keys=True, default=str) for key, given in shared.items()}
        looks = _looks(merge, told)
        return {
            output.name: self._mark(merge, output, on_deltas[output.method], told[id(output.parameters)])
            + looks.get(output.method, ())
            for output in plan.outputs
            if output.name in tensors
        }

    def _mark(self, merge: Merge, output: Output, on_deltas: bool, parameters: str) -> Mark:
        plan, sources = merge.plan, merge.sources
        if output.copies or on_deltas:
            places = [(str(plan.models[s.model].path), s.name) for s in output.reads]
            if self._untouched(output.name, places, [sources[s.model] for s in output.reads]):
                return ("untouched", output.spec.dtype)
        inputs = [(str(plan.models[s.model].path), s.name) for s in output.inputs]
        base = output.base and (str(plan.models[output.base.model].path), output.base.name)
        return (output.method, inputs, base, parameters, plan.seed, output.spec.dtype)

    def _untouched(self, output: str, places: Sequence[tuple[str, str]], sources: Sequence[Checkpoint]) -> bool:
        """Return whether all these tensors equal the base's (or the first model's) tensor of the output's name. A
        model without a head gives its embedding for it, which is another tensor.
        """
        first = self._first
        if first is None or output not in first:
            return False
        key = (output, *places)
        if key not in self._same:
            self._same[key] = all(
                torch.equal(source.read(name), first.read(output))
                for (_, name), source in zip(places, sources, strict=True)
            )
        return self._same[key]


def _looks(merge: Merge, told: dict[int, str]) -> dict[str, Mark]:
    """Return, for methods that prepare from every tensor, everything this depends on, to be part of each mark."""
    found: dict[str, Mark] = {}
    for output in merge.plan.outputs:
        if not output.copies and merge.rule(output).method.looks_first:
            found[output.method] = (*found.get(output.method, ()), output.name, told[id(output.parameters)])
    return found


def _thins(merge: Merge, output: Output) -> bool:
    """Return whether the rule of an output thins task vectors before it combines them."""
    method = None if output.copies else merge.rule(output).method
    return isinstance(method, Thinning) and method.thinned_by() is not None
