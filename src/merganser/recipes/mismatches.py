"""What does not fit between checkpoints: collected over all tensors, said at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from merganser.checkpoints.base import TensorSpec, is_integer
from merganser.errors import CheckpointError
from merganser.recipes.schema import Recipe
from merganser.recipes.settings import matches
from merganser.recipes.sources import Table
from merganser.recipes.stacking import Stacking

#: Float buffers that some library versions saved and others compute: they carry nothing learned.
_COMPUTED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias)$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$")
_SHOWN = 8


def is_buffer(name: str, spec: TensorSpec) -> bool:
    """Whether a tensor is copied, never merged."""
    return is_integer(spec.dtype) or _COMPUTED.search(name) is not None


def is_quantised(name: str, spec: TensorSpec) -> bool:
    return is_integer(spec.dtype) and len(spec.shape) > 1 and name.endswith(("weight", "weight_packed"))


def tied_source(name: str, names: Sequence[str]) -> str | None:
    """The input embedding that serves as the head of a checkpoint which stores none."""
    if not _HEAD.search(name):
        return None
    found = [n for n in names if n.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    return found[0] if len(found) == 1 else None


class Mismatches:
    """Missing tensors, unequal shapes and tensors that would be lost."""

    def __init__(self, recipe: Recipe, table: Table) -> None:
        self.recipe = recipe
        self.table = table
        self.notes: list[str] = []
        self.found: list[str] = []

    def missing(self, name: str, model: int) -> None:
        have = self.table.checkpoints[0].label
        self.found.append(f"{name!r} of {have} is missing from {self.table.models[model].label}")

    def shapes(self, name: str, given: dict[str, TensorSpec], inside: bool) -> None:
        listed = ", ".join(f"{list(spec.shape)} in {label}" for label, spec in given.items())
        shapes = {spec.shape for spec in given.values()}
        vocabulary = not inside and len({shape[1:] for shape in shapes}) == 1 and all(shapes)
        hint = ""
        if vocabulary:
            key = "tokenizer_source" if self.recipe.dialect == "mergekit" else "output.tokenizer"
            hint = f"; if their vocabularies differ, set {key} to base, union or one of the models"
        self.found.append(f"{name!r} has unequal shapes: {listed}{hint}")

    def quantised(self, name: str, label: str, spec: TensorSpec) -> None:
        self.found.append(
            f"{name!r} of {label} is {spec}: a quantised weight cannot be merged; dequantise the model first"
        )

    def complex(self, name: str, label: str, spec: TensorSpec) -> None:
        self.found.append(
            f"{name!r} of {label} is {spec}: a complex tensor cannot be merged; "
            f"to leave it out: {self._exclude_key}: [{name!r}]"
        )

    def extra(self, planned: Iterable[str], stacking: Stacking) -> None:
        """Tensors of the models that the output would silently lose; layers no slice takes are left out on purpose."""
        known = set(planned) | set(self.table.checkpoints[0].names())
        tied = self.table.checkpoints[0].aliases()
        dropped: dict[str, list[str]] = {}
        for i, checkpoint in enumerate(self.table.checkpoints):
            label = self.table.models[i].label
            for name in stacking.unmatched(i, known):
                if any(matches(glob, name) for glob in self.recipe.output.exclude):
                    continue
                if is_buffer(name, checkpoint.spec(name)):
                    dropped.setdefault(label, []).append(name)
                elif self._copies_embedding(i, name):
                    self.notes.append(f"{name!r} of {label} repeats its tied embedding and is left out")
                else:
                    why = f"ties to {tied[name]!r}" if name in tied else "has not"
                    self.found.append(
                        f"{label} has {name!r}, which {self.table.checkpoints[0].label} {why}; "
                        f"to leave it out: {self._exclude_key}: [{name!r}]"
                    )
        for label, names in dropped.items():
            self.notes.append(f"{len(names)} buffer(s) only {label} has are left out, such as {names[0]!r}")

    @property
    def _exclude_key(self) -> str:
        return "exclude" if self.recipe.dialect == "mergekit" else "output.exclude"

    def _copies_embedding(self, model: int, name: str) -> bool:
        return bool(_HEAD.search(name)) and self.table.config(model).get("tie_word_embeddings") is True

    def finish(self) -> None:
        if not self.found:
            return
        if len(self.found) == 1:
            raise CheckpointError(f"the checkpoints do not fit: {self.found[0]}")
        lines = [f"  {line}" for line in self.found[:_SHOWN]]
        if len(self.found) > _SHOWN:
            lines.append(f"  … and {len(self.found) - _SHOWN} more")
        raise CheckpointError(f"the checkpoints do not fit: {len(self.found)} problems\n" + "\n".join(lines))
