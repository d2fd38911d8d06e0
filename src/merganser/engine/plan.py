"""The plan of a merge as data: every output with its inputs, rule and parameters, made from headers alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.sidecars import Sidecars
from merganser.checkpoints.vocabulary import VocabularyMap
from merganser.notebooks import Shown


@dataclass(frozen=True)
class Model:
    """The source of the weights of one model.

    Attributes:
        label: The name of the model in messages.
        path: A reference for `open`.
        plan: Instead of a path: the plan of a nested merge, which is computed as it is read.
        vocabulary: The map to another vocabulary.
        layout: Whether to read it in the layout of the first model.
        map: Read the first model with this one in the place of a part: prefixes of its names -> prefixes there.
        experts: Read it with its experts in the order of the first model's.

    Example:
        >>> plan = mg.recipes.plan(mg.recipes.load("recipe.yml"))
        >>> [model.label for model in plan.models]
        ['base', 'math', 'code']
    """

    label: str
    path: str | None = None
    plan: Plan | None = None
    vocabulary: VocabularyMap | None = None
    layout: bool = False
    map: Mapping[str, str] | None = None
    experts: bool = False


@dataclass(frozen=True)
class Source:
    """A tensor of a model of the plan.

    Attributes:
        model: The index of the model in the plan.
        name: The name of the tensor there, which may differ from the output's (slices).

    Example:
        >>> mg.recipes.Source(model=0, name="0.weight").name
        '0.weight'
    """

    model: int
    name: str


@dataclass(frozen=True)
class Output:
    """One output tensor: `method(parameters)` of `inputs` around `base`, cast to `spec.dtype`.

    Attributes:
        name: The name of the tensor.
        spec: Its shape and dtype.
        method: The name of the merging rule.
        inputs: The models' tensors.
        base: The base's tensor, if the method needs one.
        parameters: JSON values; per-model ones are lists as long as `inputs`.
        statistics: Tensors of side checkpoints (also models of the plan) by kind, one per input.

    Example:
        >>> output = mg.recipes.plan(mg.recipes.load("recipe.yml")).outputs[0]
        >>> output.method
        'ties'
    """

    name: str
    spec: TensorSpec
    method: str
    inputs: tuple[Source, ...]
    base: Source | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[Source, ...]:
        """Return the tensors that the method merges: the inputs, then the base."""
        return (*self.inputs, self.base) if self.base else self.inputs

    @property
    def copies(self) -> bool:
        """Return whether the weights are copied unchanged (integer buffers, plain passthrough), without arithmetic."""
        return self.method == "passthrough" and self.parameters.get("scale") in (None, [None])


@dataclass(frozen=True)
class Plan(Shown):
    """A whole merge as data, made from headers alone.

    Attributes:
        models: The sources of the weights.
        outputs: The output tensors.
        aliases: Tied names of the output: alias -> stored name.
        seed: The seed of random methods.
        shard_size: The largest file, in bytes.
        sidecars: The files written besides the weights.
        notes: Notes for the user.

    Example:
        >>> plan = mg.recipes.plan(mg.recipes.load("recipe.yml"))
        >>> len(plan.outputs), plan.bytes_out
        (6, 1936)
    """

    models: tuple[Model, ...]
    outputs: tuple[Output, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    shard_size: int = 5_000_000_000
    sidecars: Sidecars = field(default_factory=Sidecars)
    notes: tuple[str, ...] = ()

    @property
    def bytes_out(self) -> int:
        return sum(output.spec.nbytes for output in self.outputs)

    def fingerprint(self, sources: Sequence[str] = ()) -> str:
        """Return a digest that identifies the result: of the plan and the fingerprints of its sources."""
        return hashlib.sha256(repr((replace(self, notes=()), *sources)).encode()).hexdigest()

    def identity(self, sources: Sequence[str]) -> str:
        """Return the fingerprint of what is merged and how, independent of where the models are."""
        return self._placeless().fingerprint(sources)

    def _placeless(self) -> Plan:
        models = tuple(
            replace(model, path=None, label="", plan=model.plan._placeless() if model.plan else None)
            for model in self.models
        )
        return replace(self, models=models, sidecars=Sidecars(), notes=())
