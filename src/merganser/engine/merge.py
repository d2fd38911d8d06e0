"""A merge that is ready to be executed: made from a recipe by `recipes`, used by everything else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.dtypes import Element
from merganser.engine.plan import Output, Plan
from merganser.methods.base import Method
from merganser.methods.registry import build, lookup
from merganser.notebooks import Shown

#: Turns a reference into an open checkpoint.
Open = Callable[[str], Checkpoint]
#: The method, the identity of its parameters and the models; outputs with equal keys share a rule.
RuleKey = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """A method with its parameters, for models with these labels; `copies` if it changes nothing."""

    method: Method
    labels: tuple[str, ...]
    copies: bool

    @property
    def whole(self) -> bool:
        """Return whether a tensor can only be computed at once."""
        return not self.copies and self.method.reach == "whole"


class Merge(Shown):
    """A plan, its open sources, and its rules, each built once.

    Args:
        plan: What to compute, as data.
        sources: The open checkpoints of `plan.models`, in their order.
        rules: Rules that were built while the plan was made, by `rule_key`.
        quantises: The merge whose result this one quantises as it is written.

    Example:
        >>> merge = mg.recipes.prepare(mg.recipes.load("recipe.yml"))
        >>> len(merge.sources)
        3
    """

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[Checkpoint],
        rules: Mapping[RuleKey, Method] | None = None,
        quantises: Merge | None = None,
    ) -> None:
        self.plan = plan
        self.sources = tuple(sources)
        self.quantises = quantises
        self._built = dict(rules or {})
        self._rules: dict[RuleKey, Rule] = {}

    def rule(self, output: Output) -> Rule:
        """Return the rule of an output. Outputs with the same method, models and parameters share it."""
        key = rule_key(output)
        if key not in self._rules:
            labels = tuple(self.plan.models[source.model].label for source in output.inputs)
            if key not in self._built:
                self._built[key] = build(lookup(output.method), output.parameters, labels)
            self._rules[key] = Rule(self._built[key], labels, output.copies)
        return self._rules[key]

    def arithmetic(self, output: Output) -> Element:
        """Return the dtype that an output is computed in: float32, or float64 if a source is."""
        names = {self.sources[source.model].spec(source.name).element.name for source in output.reads}
        return Element.of("float64" if "float64" in names else "float32")

    def only(self, outputs: Collection[Output]) -> Merge:
        """Return the same merge restricted to some outputs, with the same sources and rules."""
        part = Merge(replace(self.plan, outputs=tuple(outputs)), self.sources)
        part._built, part._rules = self._built, self._rules
        return part


def rule_key(output: Output) -> RuleKey:
    """Return the key of an output's rule; parameters count as equal if they are one object."""
    return output.method, id(output.parameters), tuple(source.model for source in output.inputs)
