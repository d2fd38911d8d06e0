"""A note on convolution kernels that a method for matrices only averages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from merganser.engine.merge import RuleKey, rule_key
from merganser.engine.plan import Output
from merganser.methods.base import Method

#: Below this share of the merged entries the note is left out (a ViT's patch embedding).
_SHARE = 0.1


def averaged_kernels(outputs: Iterable[Output], rules: Mapping[RuleKey, Method]) -> list[str]:
    """Return a note if a method for matrices averages most of the weights because they are convolution kernels."""
    chosen = [(output, rules[key]) for output in outputs if not output.copies and (key := rule_key(output)) in rules]
    if all(rule.reach != "whole" for _, rule in chosen):
        return []
    from merganser.methods.matrices import MatrixRule

    merged = kernels = count = 0
    name = ""
    for output, rule in chosen:
        if not isinstance(rule, MatrixRule):
            continue
        merged += output.spec.numel
        if len(output.spec.shape) > 2 and not rule.convolutions:
            kernels, count, name = kernels + output.spec.numel, count + 1, rule.name
    if kernels <= _SHARE * merged:
        return []
    return [
        f"{name} averages {count} convolution kernels ({kernels / merged:.0%} of the merged entries): "
        "set `convolutions: true` to treat them as matrices"
    ]
