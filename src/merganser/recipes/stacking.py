"""The tensors of the output in order, each with its depth and its place in the sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from merganser.errors import CheckpointError, RecipeError, did_you_mean
from merganser.recipes.layers import Layout, Stack, chain_depths, is_input
from merganser.recipes.schema import Entry, Part, Problems, Recipe, Slice
from merganser.recipes.sources import SourceTable

#: mergekit's names for modules whose tensors have these words in their names.
_MODULE_WORDS = {
    "text_decoder": ("language_model", "text_model", "lm_head"),
    "vision_tower": ("vision", "visual"),
    "vision_encoder": ("vision", "visual"),
    "multi_modal_projector": ("projector", "merger"),
}

#: Stacks that see or hear, beside the one that writes.
_SENSES = re.compile(r"vision|visual|image|video|audio|speech|sound")

#: A layer of the output: its model, and its number there.
LayerOrigin = tuple[int, int]


@dataclass(frozen=True)
class TensorJob:
    """An output tensor. In a slice it is tensor `rest` of layer `offset` counted from each source's first layer."""

    name: str
    t: float
    part: Part
    each: Slice
    offset: int | None = None
    rest: str = ""


@dataclass(frozen=True)
class Restacked:
    """A stack of the template with new layers: `order` gives the model and the layer number of each.

    `depths` are the numbers of layers of every model of the plan, 0 for those that are not in the stack. `tensors` are
    the names after the number of each layer, `before` those of the template's layers.
    """

    stack: Stack
    order: tuple[LayerOrigin, ...]
    depths: tuple[int, ...]
    tensors: tuple[tuple[str, ...], ...] = ()
    before: tuple[tuple[str, ...], ...] = ()

    @property
    def unchanged(self) -> bool:
        """Return whether the layers are those of the template, in their places."""
        return self.order == tuple((0, i) for i in range(self.stack.layers))


class Stacking:
    """All jobs of a recipe, and their names in the sources."""

    def __init__(self, recipe: Recipe, table: SourceTable) -> None:
        self.recipe = recipe
        self.table = table
        self.jobs: list[TensorJob] = []
        self.restacked: list[Restacked] = []
        self.notes: list[str] = []
        self.problems = Problems()
        self._rests: dict[tuple[int, str], dict[int, list[str]]] = {}
        self._stacks: dict[tuple[int, str | None], Stack] = {}
        self._shapes: dict[tuple[str | None, str], tuple[int, ...] | None] = {}
        names = table.checkpoints[0].names()
        for part, own in zip(recipe.parts, group_by_part(recipe.parts, names, table.checkpoints[0].label), strict=True):
            with self.problems.collect():
                self.jobs += self._stack_slices(part, own) if part.sliced else self._whole(part, own)

    def source_name(self, job: TensorJob, entry: Entry) -> str:
        """Return the name of the output tensor in a model."""
        if job.offset is None:
            return job.name
        # A base that is not among the sources of a slice contributes the layers of the first source.
        layers = entry.layers or job.each.models[0].layers
        assert layers is not None
        return self._stack(entry, job.part).name(layers[0] + job.offset, job.rest)

    def find_unmatched(self, model: int, known: set[str]) -> Iterator[str]:
        """Yield tensors of a model that no output uses, except those of layers that slices leave out."""
        stacks = {
            self._stack(entry, part).title
            for part, each in self._walk_slices()
            for entry in each.models
            if self.table.of(entry) == model
        }
        places = self.table.layout(model).places if stacks else {}
        for name in self.table.checkpoints[model].names():
            if name not in known and not (name in places and places[name].stack.title in stacks):
                yield name
        for part, each in self._walk_slices():
            first = each.models[0]
            for entry in each.models[1:]:
                if self.table.of(entry) == model and entry.layers and first.layers:
                    for ours, theirs in zip(range(*first.layers), range(*entry.layers), strict=True):
                        lost = set(self._group_layers(entry, part)[theirs]) - set(self._group_layers(first, part)[ours])
                        yield from (self._stack(entry, part).name(theirs, rest) for rest in sorted(lost))

    def shape_of_layers(self, part: Part, rest: str) -> tuple[int, ...] | None:
        """Return the shape a tensor has in every layer of the template, or None if it varies or is in none."""
        key = (part.module, rest)
        if key not in self._shapes:
            stack, template = self._find_main_stack(0, part, "slices"), self.table.checkpoints[0]
            having = [n for n, names in self._sort_by_number(0, stack).items() if rest in names]
            found = {template.spec(stack.name(n, rest)).shape for n in having}
            self._shapes[key] = found.pop() if len(found) == 1 else None
        return self._shapes[key]

    def depth_outside(self, name: str) -> float:
        """Return the depth of a tensor outside the layers: 0 before them, and the recipe's convention after them."""
        return 0.0 if is_input(name) else self.recipe.conventions.depth_after_layers

    def _walk_slices(self) -> Iterator[tuple[Part, Slice]]:
        """Yield the slices that choose layers, each with its part."""
        return ((part, each) for part in self.recipe.parts if part.sliced for each in part.slices)

    def _whole(self, part: Part, names: Sequence[str]) -> Iterator[TensorJob]:
        layout = self.table.layout(0)
        depths = {id(stack): {n: stack.depth(n) for n in stack.numbers} for stack in layout.stacks}
        chained = chain_depths(self.table.checkpoints[0].names())
        for name in names:
            place = layout.places.get(name)
            t = (
                chained[name]
                if name in chained
                else depths[id(place.stack)][place.number]
                if place
                else self.depth_outside(name)
            )
            yield TensorJob(name, t, part, part.slices[0])

    def _stack_slices(self, part: Part, names: Sequence[str]) -> Iterator[TensorJob]:
        """Yield the renumbered layers of the slices. Other tensors come from the first slice (before) or last
        (after).
        """
        stack = self._find_main_stack(0, part, part.slices[0].where)
        places = self.table.layout(0).places
        outside = [name for name in names if name not in places or places[name].stack != stack]
        before = {name for name in outside if name in places or is_input(name)}
        yield from (TensorJob(n, self.depth_outside(n), part, part.slices[0]) for n in outside if n in before)
        order: list[LayerOrigin] = []
        tensors: list[tuple[str, ...]] = []
        for each in part.slices:
            first = each.models[0]
            start = count = 0
            with self.problems.collect():
                start, count = self._check_range(part, each)
            by_number = self._group_layers(first, part)
            for k in range(count):
                t = k / (count - 1) if count > 1 else 1.0
                for rest in by_number[start + k]:
                    yield TensorJob(stack.name(len(order), rest), t, part, each, k, rest)
                order.append((self.table.of(first), start + k))
                tensors.append(tuple(by_number[start + k]))
        yield from (TensorJob(n, self.depth_outside(n), part, part.slices[-1]) for n in outside if n not in before)
        models = {0, *(model for model, _ in order)}
        depths = [self._find_main_stack(i, part, "slices").layers if i in models else 0 for i in range(len(self.table))]
        template = self._sort_by_number(0, stack)
        self.restacked.append(
            Restacked(
                stack, tuple(order), tuple(depths), tuple(tensors), tuple(tuple(template[n]) for n in stack.numbers)
            )
        )

    def _check_range(self, part: Part, each: Slice) -> tuple[int, int]:
        """Return the first layer and the number of layers of a slice, checked against every source."""
        counts = []
        problems = Problems()
        for entry in each.models:
            assert entry.layers is not None
            first, last = entry.layers
            stack = self._stack(entry, part)
            if last > stack.layers:
                has = f"which has {stack.layers} (0 to {stack.layers - 1}) under {stack.title!r}"
                problems.add(entry.where, f"asks for layers [{first}, {last}] of {entry.label}, {has}")
            counts.append(last - first)
        problems.finish()
        if len(set(counts)) > 1:
            pairs = zip(counts, each.models, strict=True)
            given = ", ".join(f"{count} from {entry.label}" for count, entry in pairs)
            raise RecipeError(f"{each.where}: its models must have equally many layers, got {given}")
        layers = each.models[0].layers
        assert layers is not None
        return layers[0], layers[1] - layers[0]

    def _group_layers(self, entry: Entry, part: Part) -> dict[int, list[str]]:
        """Return a mapping of layer number to the names of its tensors after the number."""
        return self._sort_by_number(self.table.of(entry), self._stack(entry, part))

    def _sort_by_number(self, model: int, stack: Stack) -> dict[int, list[str]]:
        key = (model, stack.title)
        if key not in self._rests:
            found = self._rests[key] = {}
            for place in self.table.layout(model).places.values():
                if place.stack == stack:
                    found.setdefault(place.number, []).append(place.rest)
        return self._rests[key]

    def _stack(self, entry: Entry, part: Part) -> Stack:
        return self._find_main_stack(self.table.of(entry), part, entry.where)

    def _find_main_stack(self, model: int, part: Part, where: str) -> Stack:
        """Return the stack of a model that a part slices: its module's, or else that of the language model, or the one
        with the most tensors.
        """
        key = (model, part.module)
        if key not in self._stacks:
            self._stacks[key] = self._find(self.table.layout(model), model, part, where)
        return self._stacks[key]

    def _find(self, layout: Layout, model: int, part: Part, where: str) -> Stack:
        label = self.table.models[model].label
        stacks = [s for s in layout.stacks if s.numbers == tuple(range(s.layers)) and not s.stem]
        own = [s for s in stacks if _belongs(s.prefix + ".", part.module)]
        stacks = own or [s for s in stacks if not any(_belongs(s.prefix + ".", p.module) for p in self.recipe.parts)]
        if not stacks:
            raise CheckpointError(f"{where}: {label} has no run of numbered layers (such as model.layers.0, .1, …)")
        found = max(stacks, key=lambda s: (bool(own) or not _SENSES.search(s.prefix), s.tensors))
        if model == 0 and part.module is None and len(stacks) > 1:
            others = ", ".join(repr(s.title) for s in stacks if s is not found)
            self.notes.append(f"the slices are layers of {found.title!r}; those of {others} stay as they are")
        return found


def _belongs(name: str, module: str | None) -> bool:
    words = (module, *_MODULE_WORDS.get(module, ())) if module else ()
    return any(word in name for word in words)


def group_by_part(parts: Sequence[Part], names: Sequence[str], label: str) -> list[list[str]]:
    """Return the tensors of each part. A part without a module takes all. With several modules, tensors that none
    claims by name go to the first that claims nothing else, or to the text decoder.
    """
    if len(parts) == 1:
        return [list(names)]
    groups: list[list[str]] = [[] for _ in parts]
    rest: list[str] = []
    for name in names:
        owner = next((i for i, part in enumerate(parts) if _belongs(name, part.module)), None)
        (rest if owner is None else groups[owner]).append(name)
    if rest:
        empty = [i for i, part in enumerate(parts) if not groups[i] or part.module == "text_decoder"]
        if not empty:
            raise CheckpointError(f"modules: {rest[0]!r} of {label} is in none of them")
        groups[empty[0]] += rest
    for part, group in zip(parts, groups, strict=True):
        if not group:
            tops = sorted({name.partition(".")[0] for name in names})
            raise CheckpointError(
                f"modules.{part.module}: {label} has no tensors of that name{did_you_mean(str(part.module), tops)}"
            )
    return groups
