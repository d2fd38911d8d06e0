"""Findings about a model, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "skip"]
Verdict = Literal["sound", "doubtful", "broken"]


@dataclass(frozen=True)
class Check:
    """One question about a model and its answer.

    Attributes:
        name: What was checked.
        status: `"pass"`, `"warn"`, `"fail"` or `"skip"`.
        message: What was found.

    Example:
        >>> [check.name for check in mg.evaluate.evaluate("math").checks]
    """

    name: str
    status: Status
    message: str


def verdict(checks: Sequence[Check]) -> Verdict:
    """One failure breaks a model, one warning makes it doubtful."""
    found = {check.status for check in checks}
    return "broken" if "fail" in found else "doubtful" if "warn" in found else "sound"
