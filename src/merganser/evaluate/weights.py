"""Check the weights: finite, and not all zeros."""

from __future__ import annotations

import torch

from merganser.checkpoints.base import Checkpoint, is_integer, row_blocks
from merganser.evaluate.verdicts import Check


def check_weights(checkpoint: Checkpoint) -> Check:
    """Read every floating tensor once, in blocks: NaN and infinities break a model, matrices of zeros make it
    doubtful.
    """
    broken: dict[str, int] = {}
    empty: list[str] = []
    count = 0
    for name in checkpoint.names():
        spec = checkpoint.spec(name)
        if is_integer(spec.dtype):
            continue
        count += 1
        moved = False
        for rows in row_blocks(spec):
            block = checkpoint.read(name, rows).float()
            bad = int((~torch.isfinite(block)).sum())
            if bad:
                broken[name] = broken.get(name, 0) + bad
            moved = moved or bool(block.any())
        if len(spec.shape) > 1 and spec.numel and not moved:
            empty.append(name)
    if broken:
        name, bad = max(broken.items(), key=lambda item: item[1])
        return Check("weights", "fail", f"{len(broken)} tensor(s) with NaN or infinities, {name!r} with {bad} of them")
    if empty:
        return Check("weights", "warn", f"{len(empty)} matrices are all zeros, such as {empty[0]!r}")
    return Check("weights", "pass", f"{count} tensors, all finite")
