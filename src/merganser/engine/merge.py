"""A merge that is ready to be done: what `recipes` makes of a recipe, and what everything else takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from merganser.checkpoints.base import Checkpoint
from merganser.engine.plan import Output, Plan
from merganser.methods.base import Method
from merganser.methods.registry import build, lookup
from merganser.notebooks import Shown

#: Turns a reference into an open checkpoint.
Open = Callable[[str], Checkpoint]
#: The method, the identity of its parameters, the models: outputs that agree in these share a rule.
RuleKey = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True)
class Rule:
    """A method with its parameters, for models of these labels; `copies` if it changes nothing."""

    method: Method
    labels: tuple[str, ...]
    copies: bool


class Merge(Shown):
    """A plan, its open sources, and its rules, each built once.

    Args:
        plan: What to compute, as data.
        sources: The open checkpoints of `plan.models`, in their order.
        rules: Rules that were built while the plan was made, by `rule_key`.

    Example:
        >>> merge = mg.recipes.prepare(mg.recipes.load("recipe.yml"))
        >>> len(merge.sources)
        3
    """

    def __init__(
        self, plan: Plan, sources: Sequence[Checkpoint], rules: Mapping[RuleKey, Method] | None = None
    ) -> None:
        self.plan = plan
        self.sources = tuple(sources)
        self._built = dict(rules or {})
        self._rules: dict[RuleKey, Rule] = {}

    def rule(self, output: Output) -> Rule:
        """Return the rule of an output; outputs of one method, with the same models and parameters, share it."""
        key = rule_key(output)
        if key not in self._rules:
            labels = tuple(self.plan.models[source.model].label for source in output.inputs)
            if key not in self._built:
                self._built[key] = build(lookup(output.method), output.parameters, labels)
            self._rules[key] = Rule(self._built[key], labels, output.copies)
        return self._rules[key]

    def only(self, outputs: Collection[Output]) -> Merge:
        """Return the same merge of some of its outputs, with the same sources and rules."""
        part = Merge(replace(self.plan, outputs=tuple(outputs)), self.sources)
        part._built, part._rules = self._built, self._rules
        return part


def rule_key(output: Output) -> RuleKey:
    """Return what outputs that share a rule have in common; parameters are the same if they are one object."""
    return output.method, id(output.parameters), tuple(source.model for source in output.inputs)
