"""A remark on convolution kernels that a rule for matrices leaves to averaging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from merganser.engine.merge import RuleKey, rule_key
from merganser.engine.plan import Output
from merganser.methods.base import Method
from merganser.methods.matrices import MatrixRule

#: Below this share of the merged entries it makes no difference (a ViT's patch embedding).
_SHARE = 0.1


def averaged_kernels(outputs: Iterable[Output], rules: Mapping[RuleKey, Method]) -> list[str]:
    """Say so where most of what a method is for is not done: kernels are no matrices to it unless it is told."""
    merged = kernels = count = 0
    name = ""
    for output in outputs:
        rule = rules.get(rule_key(output))
        if output.copies or not isinstance(rule, MatrixRule):
            continue
        merged += output.spec.numel
        if len(output.spec.shape) > 2 and not rule.convolutions:
            kernels, count, name = kernels + output.spec.numel, count + 1, rule.name
    if kernels <= _SHARE * merged:
        return []
    return [
        f"{name} averages {count} convolution kernels ({kernels / merged:.0%} of what it merges): "
        "`convolutions: true` treats them as matrices"
    ]
