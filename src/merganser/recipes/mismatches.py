"""What does not fit between checkpoints: collected over all tensors, said at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer
from merganser.checkpoints.quantised import is_scale
from merganser.errors import CheckpointError
from merganser.recipes.prefixes import WRAPPERS, wrapped
from merganser.recipes.schema import Recipe
from merganser.recipes.settings import matches
from merganser.recipes.sources import Table
from merganser.recipes.stacking import Stacking

#: Float buffers that some library versions saved and others compute: they carry nothing learned.
_COMPUTED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias)$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$")
#: Integer tensors that hold places rather than anything learned.
_INDEX = re.compile(r"(ids|idx|index|indices|mask|masks|bias)$")
_SHOWN = 8


def is_buffer(name: str, spec: TensorSpec) -> bool:
    """Whether a tensor is copied, never merged."""
    return is_integer(spec.dtype) or _COMPUTED.search(name) is not None


def tied_source(name: str, checkpoint: Checkpoint) -> str | None:
    """The input embedding that serves as the head of a checkpoint which stores none."""
    if not _HEAD.search(name):
        return None
    found = [n for n in checkpoint.names() if n.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    return found[0] if len(found) == 1 else None


class Mismatches:
    """Missing tensors, unequal shapes, tensors that would be lost and tensors no rule can combine."""

    def __init__(self, recipe: Recipe, table: Table) -> None:
        self.recipe = recipe
        self.table = table
        self.notes: list[str] = []
        self._found: list[str] = []
        #: Missing and surplus names by model: one line says it if all of them have one reason.
        self._names: dict[int, list[str]] = {}
        #: A quantised tensor of each model that has any where it must not.
        self._quantised: dict[int, str] = {}
        self._unlike: dict[int, str] = {}
        self._copied: dict[int, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._found or self._names or self._quantised or self._unlike)

    def add(self, line: str) -> None:
        self._found.append(line)

    def missing(self, name: str, model: int) -> None:
        have = self.table.checkpoints[0].label
        line = f"{name!r} of {have} is missing from {self.table.models[model].label}"
        self._names.setdefault(model, []).append(line)

    def shapes(self, name: str, given: Sequence[tuple[str, TensorSpec]], inside: bool) -> None:
        listed = ", ".join(f"{list(spec.shape)} in {label}" for label, spec in given)
        shapes = {spec.shape for _, spec in given}
        vocabulary = not inside and len({shape[1:] for shape in shapes}) == 1 and all(shapes)
        hint = ""
        if vocabulary:
            key = "tokenizer_source" if self.recipe.dialect == "mergekit" else "output.tokenizer"
            hint = f"; if their vocabularies differ, set {key} to base, union or one of the models"
        self.add(f"{name!r} has unequal shapes: {listed}{hint}")

    def quantised(self, name: str, model: int) -> None:
        """A merge that would combine codes, or lose them: said once for each model, of codes rather than scales."""
        if model not in self._quantised or (is_scale(self._quantised[model]) and not is_scale(name)):
            self._quantised[model] = name

    def copied_code(self, name: str, model: int) -> None:
        """Codes in the output are read as its config says, which is the template's."""
        key = "quantization_config"
        if self.table.config(model).get(key) != self.table.config(0).get(key):
            self._unlike.setdefault(model, name)

    def copied(self, name: str, spec: TensorSpec, model: int, models: int) -> None:
        """An integer tensor taken from one of several models; a table of numbers may be something learned."""
        table = len(spec.shape) > 1 and is_integer(spec.dtype) and spec.dtype != torch.bool
        if models > 1 and table and not _INDEX.search(name):
            self._copied.setdefault(model, []).append(name)

    def complex(self, name: str, label: str, spec: TensorSpec) -> None:
        self.add(
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
                if name in self.table.quantised(i):
                    self.quantised(name, i)
                elif is_buffer(name, checkpoint.spec(name)):
                    dropped.setdefault(label, []).append(name)
                elif self._copies_embedding(i, name):
                    self.notes.append(f"{name!r} of {label} repeats its tied embedding and is left out")
                else:
                    why = f"ties to {tied[name]!r}" if name in tied else "has not"
                    self._names.setdefault(i, []).append(
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
        for model, names in self._copied.items():
            label = self.table.models[model].label
            self.notes.append(f"{len(names)} integer tensor(s) are copied from {label} alone, such as {names[0]!r}")
        found = [*self._found, *self._codes()]
        for model, lines in self._names.items():
            # Codes have other names and shapes than weights: that they are codes says it all.
            if not {0, model} & self._quantised.keys():
                found += self._wrapped(model) or lines
        if not found:
            return
        if len(found) == 1:
            raise CheckpointError(f"the checkpoints do not fit: {found[0]}")
        shown = [f"  {line}" for line in found[:_SHOWN]]
        if len(found) > _SHOWN:
            shown.append(f"  … and {len(found) - _SHOWN} more")
        raise CheckpointError(f"the checkpoints do not fit: {len(found)} problems\n" + "\n".join(shown))

    def _codes(self) -> Iterator[str]:
        advice = "dequantise the model first, and name the result here"
        for model, name in self._quantised.items():
            label, spec = self.table.models[model].label, self.table.checkpoints[model].spec(name)
            count = len(self.table.quantised(model))
            yield (
                f"{name!r} of {label} is {spec}, one of {count} tensors of codes and scales: a quantised weight cannot "
                f"be merged; {advice}"
            )
        for model, name in self._unlike.items():
            label, have = self.table.models[model].label, self.table.models[0].label
            yield (
                f"{name!r} of {label} is quantised in a way that the config of {have}, which the output gets, does not "
                f"say; {advice}"
            )

    def _wrapped(self, model: int) -> list[str]:
        first, other = ({*c.names(), *c.aliases()} for c in (self.table.checkpoints[0], self.table.checkpoints[model]))
        found = wrapped(first, other)
        if found is None:
            return []
        given, expected = found
        label, have = self.table.models[model].label, self.table.models[0].label
        prefix = given.removesuffix(expected) if len(given) > len(expected) else expected.removesuffix(given)
        longer = label if len(given) > len(expected) else have
        if longer == label or WRAPPERS.fullmatch(prefix):
            change = f"take the prefix {prefix!r} off the names of {longer}"
        else:
            change = f"put the prefix {prefix!r} before the names of {label}"
        return [f"{label} calls {given!r} what {have} calls {expected!r}, and so on; {change} and save it again"]
