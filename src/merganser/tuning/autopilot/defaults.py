"""The default without data: the merge that was never far behind the best in our measurements, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from merganser.tuning.autopilot.contenders import PLAIN, Contender, without
from merganser.tuning.autopilot.decisions import Decision
from merganser.tuning.autopilot.looking import CULPRITS, Remark
from merganser.tuning.autopilot.merges import Merges


@dataclass(frozen=True)
class MeasuredSet:
    """What a default lost in one set of experts, in shares of accuracy on validation questions.

    Attributes:
        kind: The kind of model.
        experts: The number of experts.
        behind: How far the default was behind the best method at its best scale.
        blind: How far another default was behind, chosen without the sets of this kind of model.
        kept: The share of the experts' own accuracy that the default kept, if known.
    """

    kind: str
    experts: int
    behind: float
    blind: float
    kept: float | None = None


#: The default for more than two experts: the method, and its scale times the root of their number. Chosen by
#: `benchmarks.auto_defaults`, which also prints `MEASURED`.
METHOD, FACTOR = "ace", 1.5
MEASURED = (
    MeasuredSet("text", 8, behind=0.025, blind=0.025, kept=0.904),
    MeasuredSet("text", 14, behind=0.026, blind=0.026, kept=0.852),
    MeasuredSet("text", 20, behind=0.056, blind=0.056, kept=0.807),
    MeasuredSet("images", 10, behind=0.081, blind=0.081, kept=0.631),
    MeasuredSet("text", 3, behind=0.057, blind=0.057, kept=0.921),
    MeasuredSet("images", 3, behind=0.05, blind=0.05),
    MeasuredSet("language models", 3, behind=0.035, blind=0.174, kept=0.909),
)
#: What the mean of two experts kept of their accuracy, and the best of four methods: 28 pairs of text experts, and 21
#: of an MLP (`benchmarks.mergeability`).
PAIRS = {"text": (0.931, 0.956), "MLP": (0.789, 0.837)}
#: Number of experts from which the mean is no longer the default.
SEVERAL = 3


def choose_default(merges: Merges, experts: Sequence[str], remarks: tuple[Remark, ...]) -> Decision:
    """Return the default merge of experts, or the advice that there is nothing to merge."""
    blame = "".join(f". {remark.text}" for remark in remarks if remark.kind in CULPRITS)
    experts = without(experts, remarks, ("other base",))
    if len(experts) < 2:
        kept = experts[0] if experts else merges.base_name
        why = "there is only one expert" if len(merges.experts) == 1 else "no two experts are left to merge"
        text = f"do not merge: keep {kept}; {why}{blame}"
        return Decision("do not merge", text, kept, remarks=remarks, seed=merges.seed)
    chosen = default_contender(experts)
    text = (
        f"no evidence to choose by: the default is {chosen.label}. {experience(len(experts))}. Give data to choose and "
        f"to check, if only inputs without labels{blame}"
    )
    document = merges.document(chosen)
    return Decision(
        "no evidence", text, chosen.label, document, chosen.label, document, remarks=remarks, seed=merges.seed
    )


def default_contender(experts: Sequence[str]) -> Contender:
    """Return the merge that needs no tuning: the mean of two experts, or a least-squares merge of more."""
    if len(experts) < SEVERAL:
        return Contender(PLAIN, tuple(experts)).at(1 / len(experts))
    return Contender(METHOD, tuple(experts)).at(FACTOR / math.sqrt(len(experts)))


def experience(experts: int) -> str:
    """Return what the default of so many experts lost in our measurements, and how sure that makes it."""
    if experts < SEVERAL:
        found = " and ".join(
            f"{kept:.0%} of the accuracy of {kind} experts (the best of four methods {best:.0%})"
            for kind, (kept, best) in PAIRS.items()
        )
        return f"The mean of two kept {found}, on average over pairs"
    kinds = ", ".join(dict.fromkeys(each.kind for each in MEASURED))
    sizes = [each.experts for each in MEASURED]
    kept = [each.kept for each in MEASURED if each.kept is not None]
    behind, blind = ([100 * getattr(each, name) for each in MEASURED] for name in ("behind", "blind"))
    return (
        f"In {len(MEASURED)} measured sets of {min(sizes)} to {max(sizes)} experts ({kinds}) it kept {min(kept):.0%} "
        f"to {max(kept):.0%} of their accuracy, and was {fmean(behind):.0f} points behind the best method at its best "
        f"scale on average, at most {max(behind):.0f}. For another kind of model, expect {fmean(blind):.0f} points: in "
        "each set, a default chosen by the other kinds alone was so far behind on average"
    )
