"""Collect mismatches between checkpoints over all tensors and report them together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set

from merganser.checkpoints.base import Checkpoint, TensorSpec, is_integer
from merganser.checkpoints.quantised import is_scale
from merganser.checkpoints.ties import own_head
from merganser.engine.plan import Source
from merganser.errors import CheckpointError
from merganser.recipes.mismatch_reasons import NameDifferences, describe_shapes, find_reasons
from merganser.recipes.schema import Recipe
from merganser.recipes.settings import matches
from merganser.recipes.sources import SourceTable
from merganser.recipes.stacking import Stacking

#: Float buffers that some library versions save and others compute; they are not learned.
_COMPUTED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias)$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection)\.weight$")
#: Integer tensors that hold positions and are not learned.
_INDEX = re.compile(r"(ids|idx|index|indices|mask|masks|bias)$")
_SHOWN = 8


def is_computed(name: str) -> bool:
    """Return whether a tensor is a buffer that libraries compute themselves."""
    return _COMPUTED.search(name) is not None


def is_buffer(name: str, spec: TensorSpec) -> bool:
    """Return whether a tensor is copied, never merged."""
    return is_integer(spec.element) or is_computed(name)


def find_tied_embedding(name: str, checkpoint: Checkpoint) -> str | None:
    """Return the input embedding that serves as the head of a checkpoint without a stored head."""
    if not _HEAD.search(name):
        return None
    found = [n for n in checkpoint.names() if n.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    return found[0] if len(found) == 1 else None


class Mismatches:
    """Missing tensors, unequal shapes, tensors that would be lost, and tensors that no rule can combine."""

    def __init__(self, recipe: Recipe, table: SourceTable) -> None:
        self.recipe = recipe
        self.table = table
        self.notes: list[str] = []
        self._found: list[str] = []
        #: Missing and surplus names by model.
        self._missing: dict[int, list[str]] = {}
        self._surplus: dict[int, list[str]] = {}
        #: Names of tensors that have the same shapes in the same models, by those shapes.
        self._shapes: dict[tuple[tuple[int, tuple[int, ...]], ...], list[str]] = {}
        #: For each model, a quantised tensor where there must be none.
        self._quantised: dict[int, str] = {}
        self._unlike: dict[int, str] = {}
        self._copied: dict[int, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._found or self._missing or self._surplus or self._shapes or self._quantised or self._unlike)

    def add(self, line: str) -> None:
        self._found.append(line)

    def add_missing(self, name: str, model: int) -> None:
        self._missing.setdefault(model, []).append(name)

    def add_shapes(self, name: str, given: Sequence[tuple[Source, TensorSpec]], inside: bool) -> None:
        """Record unequal shapes of a tensor in several models."""
        shapes = {spec.shape for _, spec in given}
        if any(source.name != name for source, _ in given) or (not inside and _is_vocabulary(name, shapes)):
            self.add(self._describe_unequal(name, given, hint=not inside and _is_vocabulary(name, shapes)))
        else:
            key = tuple((source.model, spec.shape) for source, spec in given)
            self._shapes.setdefault(key, []).append(name)

    def add_other_layers(self, name: str, shape: tuple[int, ...], usual: tuple[int, ...], model: int) -> None:
        """Record a stacked tensor whose shape differs from that in the layers of the template."""
        self._shapes.setdefault(((0, usual), (model, shape)), []).append(name)

    def _describe_unequal(self, name: str, given: Sequence[tuple[Source, TensorSpec]], hint: bool) -> str:
        labels = [self.table.models[source.model].label for source, _ in given]
        places = [
            f"{list(spec.shape)} in {label if source.name == name else f'{source.name!r} of {label}'}"
            for (source, spec), label in zip(given, labels, strict=True)
        ]
        key = self.recipe.places.rename("output.tokenizer")
        advice = f"; if their vocabularies differ, set {key} to base, union or one of the models" if hint else ""
        return f"{name!r} has unequal shapes: {', '.join(places)}{advice}"

    def add_quantised(self, name: str, model: int) -> None:
        """Record a merge that would combine or lose codes: reported once per model, for codes rather than scales."""
        if model not in self._quantised or (is_scale(self._quantised[model]) and not is_scale(name)):
            self._quantised[model] = name

    def add_copied_code(self, name: str, model: int) -> None:
        """Record copied codes: the output reads codes by its config, which is the template's."""
        key = "quantization_config"
        if self.table.config(model).get(key) != self.table.config(0).get(key):
            self._unlike.setdefault(model, name)

    def note_copied(self, name: str, spec: TensorSpec, model: int, used: Sequence[Source]) -> None:
        """Record an integer tensor copied from one of several models; a table of numbers, or one that is of floats in
        another model, may have been learned.
        """
        if len(used) < 2 or not is_integer(spec.element) or _INDEX.search(name):
            return
        others = [(self.table.checkpoints[each.model], each.name) for each in used]
        floats = any(each in other and not is_integer(other.spec(each).element) for other, each in others)
        if floats or (len(spec.shape) > 1 and spec.element.name != "bool"):
            self._copied.setdefault(model, []).append(f"{name!r} ({spec})")

    def add_complex(self, name: str, label: str, spec: TensorSpec) -> None:
        self.add(
            f"{name!r} of {label} is {spec}: a complex tensor cannot be merged; "
            f"to leave it out: {self.recipe.places.rename('output.exclude')}: [{name!r}]"
        )

    def add_surplus(self, planned: Iterable[str], stacking: Stacking) -> None:
        """Record tensors that the output would silently lose; losing layers that no slice takes is intended."""
        known = set(planned) | set(self.table.checkpoints[0].names())
        dropped: dict[str, list[str]] = {}
        for i, checkpoint in enumerate(self.table.checkpoints):
            label = self.table.models[i].label
            for name in stacking.find_unmatched(i, known) if i != self.table.donor else ():
                if any(matches(glob, name) for glob in self.recipe.output.exclude):
                    continue
                if name in self.table.quantised(i):
                    self.add_quantised(name, i)
                elif is_buffer(name, checkpoint.spec(name)):
                    dropped.setdefault(label, []).append(name)
                elif self._copies_embedding(i, name):
                    self.notes.append(f"{name!r} of {label} repeats its tied embedding and is left out")
                else:
                    self._surplus.setdefault(i, []).append(name)
        for label, names in dropped.items():
            self.notes.append(f"{len(names)} buffer(s) that only {label} has are left out, such as {names[0]!r}")

    def _copies_embedding(self, model: int, name: str) -> bool:
        tied = self.table.config(model).get("tie_word_embeddings") is True
        return tied and bool(_HEAD.search(name)) and own_head(self.table.checkpoints[model]) != name

    def finish(self) -> None:
        for model, names in self._copied.items():
            label = self.table.models[model].label
            self.notes.append(f"{len(names)} integer tensor(s) are copied from {label} alone, such as {names[0]}")
        found = [*self._found, *self._describe_codes()]
        differences = NameDifferences(
            self.table, self._missing, self._surplus, self.recipe.places.rename("output.exclude")
        )
        models = sorted({*self._missing, *self._surplus})
        # Codes have other names and shapes than weights; report only that they are codes.
        models = [model for model in models if not {0, model} & self._quantised.keys()]
        for model in models:
            found += differences.explain(model)
        found += describe_shapes(self.table, self._shapes)
        if not found:
            return
        unlike = {*models, *(model for key in self._shapes for model, _ in key)} - {0}
        why = [reason for model in sorted(unlike) for reason in find_reasons(self.table, model)]
        heading = "the checkpoints do not fit" + (f" ({'; '.join(why)})" if why else "")
        if len(found) == 1:
            raise CheckpointError(f"{heading}: {found[0]}")
        shown = [f"  {line}" for line in found[:_SHOWN]]
        if len(found) > _SHOWN:
            shown.append(f"  … and {len(found) - _SHOWN} more")
        raise CheckpointError(f"{heading}: {len(found)} problems\n" + "\n".join(shown))

    def _describe_codes(self) -> Iterator[str]:
        advice = "dequantise the model first, and merge the result"
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
                f"{name!r} of {label} is quantised in a way that the config of the output, {have}'s, does not "
                f"describe; {advice}"
            )


def _is_vocabulary(name: str, shapes: Set[tuple[int, ...]]) -> bool:
    """Return whether the shapes of a matrix, or of the bias of a head, differ only in their rows."""
    rows_alone = len({shape[1:] for shape in shapes}) == 1 and all(shapes)
    return rows_alone and (name.endswith("bias") or all(len(shape) > 1 for shape in shapes))
