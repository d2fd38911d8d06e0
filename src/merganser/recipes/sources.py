"""The models that a recipe names, each opened once; reads headers only."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.gguf_config import gguf_notes, model_config
from merganser.checkpoints.quantised import find_codes
from merganser.checkpoints.sidecars import Edit, apply_edits, read_chat_template
from merganser.checkpoints.ties import separates_head, untie_config
from merganser.checkpoints.tokenizer import Tokens, read_tokens
from merganser.engine.merge import Merge, Open
from merganser.engine.plan import Model
from merganser.errors import CheckpointError, RecipeError, did_you_mean
from merganser.excerpts import shorten
from merganser.recipes.layers import Layout, find_layout
from merganser.recipes.references import describe_places, locate
from merganser.recipes.schema import Entry, Problems, Recipe


@dataclass(frozen=True)
class Tokenizer:
    """The directory of a model's tokenizer files, and the changes a nested merge makes to them."""

    directory: Path | None
    added: tuple[Mapping[str, Any], ...] = ()
    template: str | None = None

    @property
    def chat_template(self) -> str | None:
        return self.template if self.template is not None else read_chat_template(self.directory)


class SourceTable:
    """Every model of a recipe with its index in the plan: the base first, then in order of appearance."""

    def __init__(self, recipe: Recipe, opener: Open, nested: Callable[[Recipe], Merge]) -> None:
        self.models: list[Model] = []
        self.checkpoints: list[Checkpoint] = []
        #: A model that only provides the vocabulary.
        self.donor: int | None = None
        self._index: dict[Any, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._configs: dict[int, dict[str, Any]] = {}
        self._quantised: dict[int, frozenset[str]] = {}
        self._root = recipe.root
        self._opener = opener
        self._sides: dict[str, tuple[Model, Checkpoint]] = {}
        self._located: dict[str, str] = {}
        self._homes: dict[int, Path | None] = {}
        self._places: dict[str, int] = {}
        problems, tried = Problems(), set()
        for entry in recipe.entries():
            key = self._key(entry)
            if key not in tried:
                tried.add(key)
                with problems.collect():
                    self._add(entry, key, nested)
        problems.finish()
        #: Models that are a part of the template -> the mapping of their names.
        self._maps: dict[int, dict[str, str]] = {}
        for entry in recipe.entries():
            seen = self._maps.setdefault(self.of(entry), dict(entry.map))
            if seen != entry.map or (entry.map and not self.of(entry)):
                raise RecipeError(f"{entry.where}.map: a model can have only one map, and the base none")
        self._maps = {i: prefixes for i, prefixes in self._maps.items() if prefixes}

    def _add(self, entry: Entry, key: Any, nested: Callable[[Recipe], Merge]) -> None:
        """Open a model, or plan its nested merge."""
        index = len(self.models)
        if entry.recipe is not None:
            if entry.recipe.output.quantize is not None:
                raise RecipeError(f"{entry.where}: output.quantize: only the outermost recipe is written and quantised")
            from merganser.engine.nested import Merged

            merge = nested(entry.recipe)
            self._homes[index] = merge.sources[merge.plan.sidecars.tokenizer.model].directory
            self.models.append(Model(entry.label, plan=merge.plan))
            self.checkpoints.append(Merged(merge, entry.label))
            self._index[key] = index
            return
        opened = self._open(entry, key)
        place = _place(key, opened)
        self._index[key] = index if place is None else self._places.setdefault(place, index)
        if self._index[key] == index:
            self.models.append(Model(entry.label, key))
            self.checkpoints.append(opened)

    def __len__(self) -> int:
        return len(self.models)

    def adopt_layout(self) -> list[str]:
        """Present models that are a part of the template, or stored in another layout, in the template's layout."""
        notes = [note for each in self.checkpoints for note in each.notes()]
        notes += gguf_notes(self.checkpoints[0])
        for i in range(1, len(self)):
            if i in self._maps:
                from merganser.checkpoints.grafting import Grafted

                self.checkpoints[i] = Grafted(self.checkpoints[0], self.checkpoints[i], self._maps[i])
                self.models[i] = replace(self.models[i], map=self._maps[i])
                continue
            ours, theirs = set(self.checkpoints[0].names()), set(self.checkpoints[i].names())
            if ours <= theirs or theirs <= ours:
                continue
            from merganser.checkpoints.layouts import convert_layout

            seen = convert_layout(self.checkpoints[0], self.checkpoints[i])
            if seen is not self.checkpoints[i]:
                self.checkpoints[i] = seen
                self.models[i] = replace(self.models[i], layout=True)
                notes.append(
                    f"{self.models[i].label} is stored in another layout and is read in the layout of the base"
                )
        return notes

    def match_experts(self) -> list[str]:
        """See every mixture with its experts in the order of the first model's."""
        from merganser.checkpoints.expert_orders import MatchedExperts

        problems = Problems()
        for i in range(1, len(self)):
            with problems.collect():
                self.checkpoints[i] = MatchedExperts(self.checkpoints[i], self.checkpoints[0])
                self.models[i] = replace(self.models[i], experts=True)
        problems.finish("match_experts")
        labels = ", ".join(model.label for model in self.models[1:])
        return [f"experts of {labels} are put in the order of those of {self.models[0].label}"] if labels else []

    def of(self, entry: Entry) -> int:
        return self._index[self._key(entry)]

    def side(self, entry: Entry, kind: str) -> tuple[int, Checkpoint]:
        """Return a model's statistics of a kind: their index in the plan, after the models, and the checkpoint."""
        path = locate(entry.statistics[kind], self._root)
        if path not in self._sides:
            opened = self._open(replace(entry, where=f"{entry.where}.{kind}"), path)
            self._sides[path] = (Model(f"{kind} of {entry.label}", path), opened)
        return len(self.models) + list(self._sides).index(path), self._sides[path][1]

    @property
    def sides(self) -> list[Model]:
        return [model for model, _ in self._sides.values()]

    @property
    def side_checkpoints(self) -> list[Checkpoint]:
        return [opened for _, opened in self._sides.values()]

    def find_model(self, label: str, where: str) -> int:
        """Return the index of the model that a recipe names by path or label."""
        for i, model in enumerate(self.models):
            if label in (model.label, model.path):
                return i
        if (key := locate(label, self._root)) in self._index:
            return self._index[key]
        known = [model.label for model in self.models]
        raise CheckpointError(f"{where}: {label!r} is not a model of this merge{did_you_mean(label, known)}")

    def add_donor(self, reference: str, where: str) -> int:
        """Open a model that provides only the vocabulary of the output; return its index, after the others."""
        path = locate(reference, self._root)
        self.checkpoints.append(self._open(Entry(reference, where), path))
        self.models.append(Model(reference, path))
        self.donor = len(self.models) - 1
        return self.donor

    def layout(self, index: int) -> Layout:
        if index not in self._layouts:
            self._layouts[index] = find_layout(self.checkpoints[index].names())
        return self._layouts[index]

    def config(self, index: int) -> dict[str, Any]:
        """Return the model's config.json, for a nested merge with its changes; empty if there is none."""
        if index not in self._configs:
            config, plan = model_config(self.checkpoints[index]), self.models[index].plan
            edits: Sequence[Edit] = plan.sidecars.config if plan else ()
            if separates_head(self.checkpoints[index]):
                edits = [*edits, *untie_config(config)]
            self._configs[index] = apply_edits(config, edits) if config else config
        return self._configs[index]

    def quantised(self, index: int) -> frozenset[str]:
        """Return the tensors of a model that hold codes, or scales of codes."""
        if index not in self._quantised:
            self._quantised[index] = find_codes(self.checkpoints[index], self.config(index))
        return self._quantised[index]

    def tokenizer(self, index: int) -> Tokenizer:
        """Return a model's tokenizer: its own, or the one that its plan uses."""
        plan = self.models[index].plan
        if plan is None:
            return Tokenizer(self.checkpoints[index].directory)
        return Tokenizer(self._homes[index], plan.sidecars.tokenizer.added, plan.sidecars.chat_template)

    def tokenizer_model(self, index: int) -> int:
        """Return the index of the model with the tokenizer files of a model; a nested merge adds a side model."""
        plan = self.models[index].plan
        if plan is None:
            return index
        path = str(plan.models[plan.sidecars.tokenizer.model].path)
        if path in self._index:
            return self._index[path]
        if path not in self._sides:
            self._sides[path] = (Model(f"tokenizer of {self.models[index].label}", path), self._opener(path))
        return len(self.models) + list(self._sides).index(path)

    def tokens(self, index: int) -> Tokens | None:
        """Return the model's vocabulary, with the tokens that a nested merge adds; None if there is none."""
        tokenizer = self.tokenizer(index)
        found = read_tokens(tokenizer.directory)
        if found is None or not tokenizer.added:
            return found
        added = {record["content"]: record for record in tokenizer.added}
        ids = {**found.ids, **{token: record["id"] for token, record in added.items()}}
        return replace(found, ids=ids, added={**found.added, **added})

    def _key(self, entry: Entry) -> Any:
        if entry.recipe is not None:
            return id(entry.recipe)
        if entry.label not in self._located:
            self._located[entry.label] = locate(entry.label, self._root)
        return self._located[entry.label]

    def _open(self, entry: Entry, path: str) -> Checkpoint:
        try:
            return self._opener(path)
        except CheckpointError as error:
            missing = "no such" in str(error)
            raise CheckpointError(
                f"{entry.where}: {error}{describe_places(path, self._root) if missing else ''}"
            ) from error
        except OSError as error:
            shown = shorten(path, 80, "start")
            raise CheckpointError(f"{entry.where}: {shown}: cannot be opened: {error.strerror}") from error


def _place(reference: str, checkpoint: Checkpoint) -> str | None:
    """Return the real path of a reference to a path, so that spellings of it and links to it are one model.

    Returns None for a name that only looks like a path, of weights that are elsewhere.
    """
    directory = checkpoint.directory
    if directory is None or not os.path.exists(reference):
        return None
    place, around = os.path.realpath(reference), os.path.realpath(os.path.dirname(os.path.abspath(reference)))
    return place if os.path.realpath(directory) in (place, around) else None
