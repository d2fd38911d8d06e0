"""`merganser merge --prove`: print how far our application of adapters is from PEFT's own merge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.cli.output import emit, say

if TYPE_CHECKING:
    from merganser.engine.merge import Merge


def show_proofs(merge: Merge, as_json: bool) -> None:
    """Check every adapter of a merge, including those of nested merges, and raise at the first that fails."""
    from merganser.checkpoints.adapter import find_adapters
    from merganser.checkpoints.adapter_proof import prove
    from merganser.engine.nested import Merged

    pending, seen = list(merge.sources), 0
    while pending:
        source = pending.pop(0)
        if isinstance(source, Merged):
            pending += source.sources
        for adapted in find_adapters(source):
            seen += 1
            for proof in prove(adapted):
                if as_json:
                    path = str(adapted.adapter.path)
                    emit({"event": "proof", "adapter": path, "kind": proof.kind, "parameters": proof.parameters,
                          "residual": proof.residual, "own": proof.own})  # fmt: skip
                else:
                    way = "" if proof.own else " (merged by PEFT itself)"
                    say(
                        f"proved {adapted.adapter.path}: {proof.parameters:,} weights of kind {proof.kind} as PEFT "
                        f"merges them, up to {proof.residual:.1e} of the change{way}"
                    )
    if not seen and not as_json:
        say("nothing to prove: no model of this merge has an adapter")
