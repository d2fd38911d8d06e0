"""Experts stored as one shared vector and one bit per weight: TALL masks and EMR.

With task vectors Δ_t = θ_t − θ_0, an expert is rebuilt as θ_0 + λ_t · m_t ⊙ Δ.

- `tall` (Wang et al. 2024, Localizing Task Information, arXiv:2405.07813): Δ = ΣΔ_t or the task vector of any other
  merge, m_t = [|Δ_t| > κ_t |Δ − Δ_t|], λ_t = 1; larger thresholds κ_t give sparser masks.
- `emr` (Huang et al. 2024, EMR-Merging, arXiv:2405.17461): Δ has the sign of ΣΔ_t and the largest magnitude among the
  tasks of that sign, m_t = [Δ_t Δ > 0], λ_t = ‖Δ_t‖₁ / ‖m_t ⊙ Δ‖₁.

Experts are looked up, rebuilt, extracted and measured as in a `Library`, so that storage and fidelity can be compared.
The rest differs: a new expert changes the shared vector, so there is no `add` or `remove`; `merge` has a scale and uses
all experts, since only their sum or election is stored; a build cannot be resumed; there are no checksums to verify.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text, is_integer
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.directory import Directory
from merganser.checkpoints.dtypes import dtype_of
from merganser.checkpoints.opening import Reference
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.quantised import refuse_quantised
from merganser.checkpoints.vectors import Combination, Difference, Stored, Vector, compute_in_blocks, widen
from merganser.confine import confine
from merganser.engine.geometry import Parts, over_blocks
from merganser.engine.publishing import check_out, publish
from merganser.engine.task_vector import Applied
from merganser.errors import CheckpointError, InputError, did_you_mean, one_of, require_mapping
from merganser.library.bases import main_dtype, open_base, place_of
from merganser.library.changes import check_finite, is_comparable
from merganser.library.collection import ExpertCollection
from merganser.library.manifest import check_name, read_json, read_named_sections, write_json
from merganser.library.manifest_sections import ManifestSection
from merganser.library.mask_bits import FULL, MaskKind, Packed, unpack
from merganser.library.sizes import Size
from merganser.recipes.saving import save

FILE = "masks.json"
FORMAT, VERSION = "merganser-masks", 1


class MaskLibrary(ExpertCollection):
    """Experts of one base, stored as binary masks over a shared task vector. Create one with `MaskLibrary.build`.

    Args:
        path: The directory of the library.
        base: Where the base is now, if it was moved.

    Raises:
        CheckpointError: If there is no such library, or the base is not the one it was built from.

    Example:
        >>> masks = mg.library.MaskLibrary.build("base", {"math": "math", "code": "code"}, "masks")
        >>> masks.experts
        ('math', 'code')
    """

    def __init__(self, path: str | os.PathLike[str], base: Reference | None = None) -> None:
        self.path = Path(path)
        content = read_json(self.path / FILE, "a library of masks", FORMAT, (VERSION,))
        self.kind = cast(MaskKind, content.choice("kind", get_args(MaskKind)))
        place = content.text("base") if content.has("base") else None
        fingerprint = content.text("fingerprint")
        self._scales = {name: _read_scale(record) for name, record in read_named_sections(content, "experts")}
        content.done()
        self.base = open_base(self.path, self.path / "base" if place is None else place, (fingerprint,), base)
        self.shared = Stored(open_checkpoint(self.path / "shared"))

    @classmethod
    def build(
        cls,
        base: Reference,
        experts: Mapping[str, Reference],
        path: str | os.PathLike[str],
        *,
        kind: MaskKind = "tall",
        threshold: float | Mapping[str, float] = 0.4,
        merged: Reference | None = None,
        dtype: str | torch.dtype | None = None,
        on_step: Callable[[str, str], None] = lambda action, name: None,
    ) -> MaskLibrary:
        """Write the shared vector and the masks of experts to a directory, by streaming.

        Tensors that the base lacks, or has in another shape (heads), are stored whole.

        Args:
            base: The base of all experts. A base in memory is copied into the library.
            experts: The experts by name.
            path: The directory to create.
            kind: `"tall"` or `"emr"` masks.
            threshold: κ of the TALL masks, for all experts or by name.
            merged: A merge of the experts, for example by TIES. TALL masks then choose from its task vector instead of
                from the sum of all.
            dtype: The dtype of the shared vector; by default that of most of the base.
            on_step: Called with the current step and the name of the expert or tensor.

        Returns:
            The library.

        Raises:
            InputError: If names or thresholds are invalid, an expert or the merge does not fit the base, or a merge is
                given for EMR masks, which elect their own.
        """
        directory = Path(path)
        one_of("kind of masks", kind, MaskKind)
        require_mapping("experts", experts)
        if not experts:
            raise InputError("a library of masks needs at least one expert")
        for name in experts:
            check_name(name)
        if kind == "emr" and merged is not None:
            raise InputError("EMR masks elect a vector of their own: leave `merged` out, or use TALL masks")
        thresholds = _read_thresholds(threshold, list(experts))
        asked = None if dtype is None else dtype_of(dtype)
        check_out(directory, overwrite=False)
        origin, place = open_checkpoint(base), place_of(base)
        opened = {name: open_checkpoint(reference) for name, reference in experts.items()}
        for checkpoint in (origin, *opened.values()):
            refuse_quantised(checkpoint)
        # A tensor that one expert cannot share is kept whole by all of them.
        exclude = sorted({tensor for expert in opened.values() for tensor in _find_own_tensors(origin, expert)})
        own = {name: [tensor for tensor in exclude if tensor in expert] for name, expert in opened.items()}
        deltas = {name: Difference(expert, origin, exclude) for name, expert in opened.items()}
        _check_finite(origin, origin.label)
        for name, expert in opened.items():
            on_step("looking at", name)
            _check_finite(expert, f"expert {name!r}, {expert.label}")
        if kind == "emr":
            united: Vector = Elected(list(deltas.values()))
        elif merged is not None:
            merge = open_checkpoint(merged)
            united = Difference(merge, origin, exclude)
            _check_finite(merge, f"the merge, {merge.label}")
        else:
            united = Combination([(1.0, d) for d in deltas.values()])

        def write(made: Path) -> None:
            kept = origin if place is not None else open_checkpoint(save(origin, made / "base"))
            on_step("adding up", ", ".join(opened))
            save(united, made / "shared", dtype=asked or main_dtype(origin))
            shared = Stored(open_checkpoint(made / "shared"))
            records: dict[str, dict[str, float]] = {}
            (made / "experts").mkdir()
            for name, delta in deltas.items():
                on_step("masking", name)
                packed = Packed(delta, shared, kind, thresholds[name], opened[name], own[name])
                save(packed, made / "experts" / name)
                records[name] = {"scale": _compute_rescaler(delta, shared) if kind == "emr" else 1.0}
            content = {"kind": kind, "base": place, "fingerprint": kept.fingerprint(), "experts": records}
            write_json(made / FILE, {"format": FORMAT, "version": VERSION, **content})

        publish(directory, write)
        return cls(directory, None if place is None else origin)

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self._scales)

    def expert(self, name: str) -> MaskedExpert:
        """Return an expert as a checkpoint, rebuilt while it is read."""
        if name not in self:
            raise InputError(f"{self.path}: has no expert {name!r}{did_you_mean(name, self.experts)}")
        return MaskedExpert(self.base, self.shared, self._open_bits(name), self._scales[name], name)

    def _open_bits(self, name: str) -> Checkpoint:
        place = confine(self.path, f"experts/{name}", f"{self.path / FILE}: experts")
        if not place.is_dir():
            raise CheckpointError(f"{place}: the masks of the expert {name!r} are missing; build the library again")
        return Directory(place)  # `open` would return the expert itself

    def density(self, name: str) -> float:
        """Return the share of entries that an expert's mask keeps."""
        expert = self.expert(name)
        ones = sum(int(expert.mask(tensor).sum()) for tensor in self.shared.names())
        return ones / max(1, sum(self.shared.spec(tensor).numel for tensor in self.shared.names()))

    def merge(self, scale: float = 1.0) -> Applied:
        """Return θ_0 + scale · Δ without masks: the merge that all experts share, scaled."""
        return Applied(self.base, self.shared, scale)

    def extract(self, name: str, out: str | os.PathLike[str], **options: Any) -> Path:
        """Rebuild an expert as an ordinary checkpoint directory (options of `mg.save`)."""
        return save(self.expert(name), out, **options)

    def size(self) -> Size:
        """Return the bytes of the base's weights, of the shared vector and of every expert's masks."""
        return Size(
            base=self.base.nbytes,
            experts={name: self._open_bits(name).nbytes for name in self.experts},
            shared=open_checkpoint(self.path / "shared").nbytes,
        )


class Elected(Vector):
    """The sign of ΣΔ_t with the largest |Δ_t| among those of that sign."""

    def __init__(self, deltas: Sequence[Vector]) -> None:
        specs = {name: deltas[0].spec(name) for name in deltas[0].names()}
        super().__init__(specs, f"elected of {', '.join(delta.label for delta in deltas)}", deltas)
        self.deltas = deltas

    def compute(self, name: str, rows: Rows | None) -> Tensor:
        parts = [delta.compute(name, rows) for delta in self.deltas]
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        sign = total.sign_()
        largest = torch.zeros_like(sign)
        for part in parts:
            torch.maximum(largest, part.mul_(sign), out=largest)
        return largest.mul_(sign)


class MaskedExpert(View):
    """θ_0 + λ · m ⊙ Δ; tensors kept whole are the expert's own."""

    def __init__(self, base: Checkpoint, shared: Vector, bits: Checkpoint, scale: float, name: str) -> None:
        super().__init__(base, f"{name} over {base.label}")
        self.name, self.shared, self.bits, self.scale = name, shared, bits, scale
        self._own = {stored.removesuffix(FULL) for stored in bits.names() if stored.endswith(FULL)}

    def names(self) -> Sequence[str]:
        return [*self.source.names(), *sorted(self._own - set(self.source.names()))]

    def spec(self, name: str) -> TensorSpec:
        name = self.source.resolve_alias(name)
        return self.bits.spec(name + FULL) if name in self._own else self.source.spec(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        name = self.source.resolve_alias(name)
        if name in self._own:
            return self.bits.read(name + FULL, rows)
        if name not in self.shared:
            return self.source.read(name, rows)
        return compute_in_blocks(widen(self.source.spec(name)), rows, lambda part: self._compute(name, part))

    def mask(self, name: str, rows: Rows | None = None) -> Tensor:
        """Return m of one tensor, or of its rows, as booleans."""
        return unpack(self.bits, name, self.source.spec(name).shape, rows)

    def _compute(self, name: str, rows: Rows | None) -> Tensor:
        moved = self.shared.compute(name, rows).masked_fill_(~self.mask(name, rows), 0)
        return torch.add(self.source.read(name, rows).to(moved.dtype), moved, alpha=self.scale)

    def fingerprint(self) -> str:
        parts = f"{self.source.fingerprint()} {self.shared.fingerprint()} {self.bits.fingerprint()} {self.scale!r}"
        return hash_text(parts)

    def files(self) -> Sequence[Path]:
        return [*self.source.files(), *self.shared.files(), *self.bits.files()]

    def lineage(self) -> Lineage:
        return Lineage(self.source.label, (self.name,), ("masked expert",))


def _compute_rescaler(delta: Vector, shared: Vector) -> float:
    """Return ‖Δ_t‖₁ / ‖m_t ⊙ Δ‖₁ over all tensors."""

    def sums(parts: Parts) -> tuple[float, float]:
        own, united = parts
        return float(np.abs(own).sum()), float(np.abs(united[own * united > 0]).sum())

    found = [value for _, value in over_blocks([delta, shared], delta.names(), sums)]
    total = math.fsum(kept for _, kept in found)
    return math.fsum(own for own, _ in found) / total if total else 1.0


def _read_scale(record: ManifestSection) -> float:
    scale = record.number("scale")
    record.done()
    return scale


def _find_own_tensors(base: Checkpoint, expert: Checkpoint) -> list[str]:
    """Return the tensors that the base lacks or has differently: new ones, other shapes, other integers."""

    def shared(name: str) -> bool:
        spec = expert.spec(name)
        return is_comparable(base, name, spec) and (
            not is_integer(spec.dtype) or torch.equal(expert.read(name), base.read(name))
        )

    return [name for name in expert.names() if not shared(name)]


def _read_thresholds(given: float | Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return κ of every expert."""
    each = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name in names:
        if name not in each:
            raise InputError(f"threshold: missing for the expert {name!r}")
    for name, value in each.items():
        if name not in names:
            raise InputError(f"threshold: there is no expert {name!r}{did_you_mean(str(name), names)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InputError(f"threshold: expected a number of at least 0, got {value!r} for {name!r}")
    return {name: float(each[name]) for name in names}


def _check_finite(checkpoint: Checkpoint, where: str) -> None:
    for name in checkpoint.names():
        check_finite(checkpoint.read(name), name, where)


def open_expert(path: Path) -> Checkpoint:
    """Return the expert of a library of masks that a path names, for `merganser.open`."""
    if (path / FILE).is_file():
        known = ", ".join(MaskLibrary(path).experts)
        raise CheckpointError(f"{path}: a library of masks; open one of {known} as {path}/experts/NAME")
    return MaskLibrary(path.parent.parent).expert(path.name)
