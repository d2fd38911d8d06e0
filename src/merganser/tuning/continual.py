"""Continual merging by OPCM: experts arrive one by one, and the state for the next one is kept."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from torch import Tensor

from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.engine.task_vector import TaskVector
from merganser.errors import CheckpointError, InputError
from merganser.evaluate.search import scaled
from merganser.methods.opcm import OPCM
from merganser.recipes.saving import save
from merganser.strict_json import parse_json

STATE = "continual.json"


class Continual:
    """A merge that takes one more expert at a time and needs none of the earlier ones again.

    Gives the same result as the method `opcm` for the same experts in the same order, from the merge so far and two
    numbers: how many experts it contains, and its gain λ = ‖S‖ / mean ‖Δ_t‖. Keeps the merged task vector in memory, in
    float32.

    Args:
        base: The base of all experts.
        share: Share of the nuclear norm whose directions are closed to the next expert.

    Attributes:
        count: Number of experts merged so far.

    Example:
        >>> line = mg.tuning.Continual("base")
        >>> line.add("math")
        >>> written = line.save("out")
        >>> later = mg.tuning.Continual.load("out", "base")
        >>> later.add("code")
        >>> later.count
        2
    """

    def __init__(self, base: Reference, *, share: float = 0.5) -> None:
        if not 0 <= share <= 1:
            raise InputError(f"share must be in [0, 1], got {share}")
        self.base = base
        self.count = 0
        self._rule = OPCM(share=share)
        self._sum: dict[str, Tensor] = {}
        self._mean = 0.0

    def add(self, expert: Reference) -> None:
        """Merge one more expert.

        Args:
            expert: A path, hub id, state dict, module or checkpoint, fine-tuned from the base.

        Raises:
            CheckpointError: If it cannot be opened, its tensors are not those of the base, or not all are finite.
        """
        vector = TaskVector(expert, self.base).state_dict()
        if not math.isfinite(norm := _norm(vector)):
            raise CheckpointError("the expert holds NaN or infinite values, which would stay in the merge for good")
        if self._sum and (other := vector.keys() ^ self._sum.keys()):
            raise CheckpointError(f"the expert and those before it differ in the tensor {sorted(other)[0]!r}")
        self._sum = {
            name: self._rule.accumulate(name, self._sum[name].double(), delta.double()).float()
            if self._sum
            else delta.float()
            for name, delta in vector.items()
        }
        self._mean += (norm - self._mean) / (self.count + 1)
        self.count += 1

    @property
    def gain(self) -> float:
        """Return λ = ‖S‖ / mean ‖Δ_t‖; 1 while nothing differs from the base."""
        return _norm(self._sum) / self._mean if self._mean > 0 else 1.0

    def weights(self) -> dict[str, Tensor]:
        """Return the merged weights θ_0 + S / λ, in the dtypes of the base."""
        base = open_checkpoint(self.base)
        return scaled({name: base[name] for name in base}, self._sum, 1 / self.gain)

    def save(self, out: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the merge as a checkpoint, with its state beside it.

        Args:
            out: The directory to write.
            overwrite: Replace an existing directory.

        Returns:
            The directory, which `load` reads.
        """
        vector = TaskVector(self.weights(), self.base)
        written = save(open_checkpoint(self.base) + vector, out, overwrite=overwrite)
        state = {"experts": self.count, "gain": self.gain, "share": self._rule.share}
        state["norm"] = _norm(vector.state_dict())
        (written / STATE).write_text(json.dumps(state) + "\n")
        return written

    @classmethod
    def load(cls, directory: str | os.PathLike[str], base: Reference) -> Continual:
        """Read a merge that `save` wrote, to continue it.

        Args:
            directory: The merge so far.
            base: The base it was made with.

        Returns:
            The merge, ready for one more expert.

        Raises:
            CheckpointError: If the directory holds no such state, or was made with another base.
        """
        try:
            state = parse_json((Path(directory) / STATE).read_text())
            count = int(state["experts"])
            gain, share, norm = (float(state[key]) for key in ("gain", "share", "norm"))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{directory}: no state of a continual merge in {STATE} ({error})") from None
        found = cls(base, share=share)
        vector = TaskVector(str(directory), base).state_dict()
        found.count, found._mean = count, _norm(vector)
        if not math.isclose(found._mean, norm, rel_tol=1e-3, abs_tol=1e-12):
            raise CheckpointError(
                f"{directory}: the merge is {norm:.5g} away from its base, and {found._mean:.5g} from this one; give "
                "the base it was made with, or start anew if the weights have been changed"
            )
        found._sum = {name: value.float() * gain for name, value in vector.items()}
        return found


def _norm(vector: dict[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float(value.double().square().sum()) for value in vector.values()))
