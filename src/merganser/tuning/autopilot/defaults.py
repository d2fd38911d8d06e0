"""The default without data: there is no evidence to choose by, so it explains its reason."""

from __future__ import annotations

from collections.abc import Sequence

from merganser.tuning.autopilot.contenders import PLAIN, Contender, without
from merganser.tuning.autopilot.decisions import Decision
from merganser.tuning.autopilot.looking import CULPRITS, Remark
from merganser.tuning.autopilot.merges import Merges

#: Number of experts from which a spectral method is the default.
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
        f"no evidence to choose by: the default is {chosen.label}, because {reason(len(experts))}. Measures of the "
        "weights alone hardly predict how well experts merge (in our benchmark of 28 pairs of text experts the rank "
        f"correlation with what their mean loses is at most 0.29); give data to choose and to check{blame}"
    )
    document = merges.document(chosen)
    return Decision(
        "no evidence", text, chosen.label, document, chosen.label, document, remarks=remarks, seed=merges.seed
    )


def default_contender(experts: Sequence[str]) -> Contender:
    """Return the merge that needs no tuning: the mean of two experts, or `iso_cts` at scale 1 for more."""
    if len(experts) < SEVERAL:
        return Contender(PLAIN, tuple(experts)).at(1 / len(experts))
    return Contender("iso_cts", tuple(experts)).at(1.0)


def reason(experts: int) -> str:
    """Return why that merge is the default."""
    if experts < SEVERAL:
        return "the mean of two experts lies between them"
    return (
        "with its scale left at 1 it was the best method on 14 and 20 text experts (0.80 and 0.81 accuracy; tsv 0.79 "
        "and 0.75) and within 0.03 of the best on 8"
    )
