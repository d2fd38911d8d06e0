"""Check that an adapter is applied as PEFT applies it, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from merganser.checkpoints.adapter import Adapted
from merganser.checkpoints.adapter_kohya import LoraFile
from merganser.checkpoints.adapter_peft import PeftLayers
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.layouts import module_tensors
from merganser.checkpoints.lazy_tensors import LazyTensor, StoredTensor
from merganser.checkpoints.skeleton import build_from_config, build_plain_skeleton, find_shared_parameters
from merganser.errors import CheckpointError, MerganserError
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import nn

#: For float32: two ways to compute a product differ by rounding.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class LayerProof:
    """The largest difference from PEFT in one kind of layer: ‖ours − PEFT's‖ / ‖PEFT's − base‖.

    `own` is False if PEFT itself merged the layers, so that only their names are checked.
    """

    kind: str
    parameters: int
    residual: float
    own: bool


def prove(adapted: Adapted) -> list[LayerProof]:
    """Compare every changed layer with PEFT's own merge of it.

    Args:
        adapted: An adapter over its base.

    Returns:
        The largest residual of each kind of layer. Modules that the adapter saves whole have the kind "saved".

    Raises:
        CheckpointError: If PEFT cannot attach the adapter to the base.
        MerganserError: If a residual is larger than rounding explains.

    Example:
        >>> prove(open("base+adapter"))  # doctest: +SKIP
        [LayerProof(kind='Linear', parameters=64, residual=1.2e-07, own=True)]
    """
    if isinstance(adapted.adapter, LoraFile):
        raise CheckpointError(f"{adapted.adapter.path}: is not a PEFT adapter, so there is nothing to compare with")
    config = read_config(adapted.source.directory)
    rows = _count_new_rows(adapted)
    if rows is not None:
        config = _set_vocabulary(config, rows)
    fresh = build_from_config(config) if config else build_plain_skeleton(adapted.source, adapted.adapter.embeddings())
    plain = build_from_config(config) if config else None
    if fresh is None:
        raise CheckpointError(
            f"{adapted.source.label}: the proof needs its modules; transformers is not installed or does not know them"
        )
    layers = PeftLayers(adapted.adapter, fresh)
    base, ours = (_Parameters(each, plain, adapted) for each in (adapted.source, adapted))
    found: dict[str, list[float]] = {}
    for path, names in layers.layers.items():
        merged = layers.merge(path, lambda name: base[name].read())
        for name in names:
            start = layers.saved.get(name)
            start = base[name].read() if start is None else start
            gap = _measure_residual(ours[name].read(), merged[name], start)
            found.setdefault(layers.kind(path), []).append(gap)
    for name, whole in layers.saved.items():
        if not any(name in names for names in layers.layers.values()):
            found.setdefault("saved", []).append(_measure_residual(ours[name].read(), whole, torch.zeros_like(whole)))
    own = not adapted.adapter.needs_peft
    proofs = [LayerProof(kind, len(gaps), max(gaps), own) for kind, gaps in found.items()]
    for proof in proofs:
        if not proof.residual <= TOLERANCE:
            raise MerganserError(
                f"{adapted.adapter.path}: {proof.kind} layers differ from PEFT's merge by {proof.residual:.1e} of what "
                "the adapter changes; merge it with peft, and report this"
            )
    return proofs


def _measure_residual(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    gap = float((ours.double() - theirs.double()).norm())
    changed = float((theirs.double() - base.double()).norm()) if base.shape == theirs.shape else 1.0
    # A layer that PEFT does not change must not change here.
    return gap / changed if changed else (0.0 if gap == 0 else float("inf"))


class _Parameters(dict[str, LazyTensor]):
    """Parameters of a model by name; a tied name has the tensor it is tied to."""

    def __init__(self, checkpoint: Checkpoint, model: nn.Module | None, adapted: Adapted) -> None:
        super().__init__(module_tensors(checkpoint, model) if model is not None else {})
        self._checkpoint, self._adapted = checkpoint, adapted
        self._tied = find_shared_parameters(model) if model is not None else {}

    def __missing__(self, name: str) -> LazyTensor:
        target = self._adapted.stored_name(name)
        if target is not None:
            return StoredTensor(self._checkpoint, self._adapted.resolve(target, self._checkpoint))
        other = next((each for each in self._tied.get(name, ()) if each in self), None)
        if other is None:
            raise CheckpointError(f"{self._checkpoint.label} has no {name!r}")
        return self[other]


def _count_new_rows(adapted: Adapted) -> int | None:
    """Return the number of embedding rows with the adapter, if it differs from the base's."""
    for name in adapted.adapter.replaced:
        target = adapted.stored_name(name)
        if target is None:
            continue
        rows = adapted.adapter.weights.spec(adapted.adapter.replaced[name]).shape[0]
        if rows != adapted.source.spec(adapted.resolve(target, adapted.source)).shape[0]:
            return rows
    return None


def _set_vocabulary(config: dict[str, object], rows: int) -> dict[str, object]:
    text = config.get("text_config")
    inner = {"text_config": text | {"vocab_size": rows}} if isinstance(text, dict) and "vocab_size" in text else {}
    return config | inner | ({"vocab_size": rows} if "vocab_size" in config else {})
