"""Findings about a model, and the resulting verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["pass", "warn", "fail", "skip"]
Verdict = Literal["sound", "doubtful", "broken"]


@dataclass(frozen=True)
class Check:
    """One check of a model and its result.

    Attributes:
        name: What was checked.
        status: `"pass"`, `"warn"`, `"fail"` or `"skip"`.
        message: The finding.

    Example:
        >>> [check.name for check in mg.evaluate.evaluate("math").checks]
    """

    name: str
    status: CheckStatus
    message: str


def verdict(checks: Sequence[Check]) -> Verdict:
    """Return the verdict: one failure means broken, one warning doubtful."""
    found = {check.status for check in checks}
    return "broken" if "fail" in found else "doubtful" if "warn" in found else "sound"
