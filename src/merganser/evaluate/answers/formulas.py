"""Tell formulas from numbers: `2\\sqrt{3}`, `x/2` and `n > 3` contain numbers, but their answer is none of them."""

from __future__ import annotations

import re

#: Single letters that are variables next to a number or an operator; others may be units.
_VARIABLE = "[xyznibr]"
_FORMULA = re.compile(
    rf"""
      \\[a-zA-Z]+                                              # a command, such as \sqrt, \pi, \frac or \infty
    | [π√∞]
    | \d\s?{_VARIABLE}\s*(?:$|[-+*/^(=])                       # 3x, 2n+1
    | (?<![a-zA-Z]){_VARIABLE}\s*(?:\^\s*\{{?\w+\}}?\s*)?[-+*/]  # x - 1, x^2 + 1
    | [-+*/]\s*{_VARIABLE}(?![a-zA-Z])                         # 1/n
    | (?<![a-zA-Z])[a-z]\(                                     # f(2)
    | (?<![a-zA-Z|/<])[a-z]\s*(?:[<>]=?|[≤≥])                  # x > 3
    """,
    re.VERBOSE,
)
#: Commands beside a number that do not change its value.
_HARMLESS = re.compile(r"\\(?:approx|simeq|degree|pounds|euro|hspace\{[^}]*\}|boxed|fbox)(?![a-zA-Z])")


def is_formula(answer: str) -> bool:
    """Return whether a normalised answer is a formula, of which no single number is the value.

    Args:
        answer: An answer alone, without the words around it.

    Example:
        >>> is_formula("2\\\\sqrt{3}"), is_formula("3x + 5"), is_formula("x = 3"), is_formula("18 m^2")
        (True, True, False, False)
    """
    return bool(_FORMULA.search(_HARMLESS.sub("", answer)))
