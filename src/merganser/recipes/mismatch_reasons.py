"""Explain why checkpoints do not fit, with few reasons for many names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from merganser.recipes import config_differences
from merganser.recipes.layers import Stack
from merganser.recipes.prefixes import WRAPPERS, find_prefix
from merganser.recipes.sources import SourceTable


class NameDifferences:
    """Summarises missing and surplus names of each model in a few lines: a depth, a prefix, a pattern over layers."""

    def __init__(
        self,
        table: SourceTable,
        missing: Mapping[int, Sequence[str]],
        surplus: Mapping[int, Sequence[str]],
        exclude_key: str,
    ) -> None:
        self._table = table
        self._missing = missing
        self._surplus = surplus
        self._key = exclude_key

    def explain(self, model: int) -> list[str]:
        """Return the lines for one model."""
        missing, surplus = list(self._missing.get(model, ())), list(self._surplus.get(model, ()))
        if alone := self._explain_factors(model) or self._explain_prefix(model):
            return [alone]
        lines = []
        for stack, other in self._find_unequal_depths(model):
            lines.append(self._explain_depth(model, stack, other))
            missing = [name for name in missing if not self._is_in(0, name, stack, set(other.numbers))]
            surplus = [name for name in surplus if not self._is_in(model, name, other, set(stack.numbers))]
        have, label = self._table.models[0].label, self._table.models[model].label
        lines += [
            f"{each} of {have} {is_} missing from {label}" for each, is_, _ in self._group_names(missing, 0, model)
        ]
        tied = self._table.checkpoints[0].aliases()
        for each, is_, glob in self._group_names(surplus, model):
            why = f"ties to {tied[glob]!r}" if glob in tied else "does not have"
            it = "it" if is_ == "is" else "them"
            lines.append(f"{label} has {each}, which {have} {why}; to leave {it} out: {self._key}: [{glob!r}]")
        return lines

    def _explain_factors(self, model: int) -> str | None:
        label = self._table.models[model].label
        if not any(".lora_A." in name or ".lora_B." in name for name in self._table.checkpoints[model].names()):
            return None
        return (
            f"{label} holds the factors of a LoRA adapter, not weights; name the directory with its "
            "adapter_config.json, or write base+adapter"
        )

    def _explain_prefix(self, model: int) -> str | None:
        checkpoints = self._table.checkpoints
        first, other = ({*c.names(), *c.aliases()} for c in (checkpoints[0], checkpoints[model]))
        found = find_prefix(first, other)
        if found is None:
            return None
        given, expected = found
        label, have = self._table.models[model].label, self._table.models[0].label
        prefix = given.removesuffix(expected) if len(given) > len(expected) else expected.removesuffix(given)
        longer = label if len(given) > len(expected) else have
        if longer == have and WRAPPERS.fullmatch(prefix):
            change = f"remove the prefix {prefix!r} from the names of {have} and save it again"
        else:
            old, new = (prefix, "") if longer == label else ("", prefix)
            change = f"write `map: {{{old!r}: {new!r}}}` beside {label}"
        return f"{label} calls {given!r} what {have} calls {expected!r}, and so on; {change}"

    def _find_unequal_depths(self, model: int) -> Iterator[tuple[Stack, Stack]]:
        """Yield the stacks whose depth in a model differs from the template's."""
        ours = {stack.title: stack for stack in self._table.layout(0).stacks}
        for other in self._table.layout(model).stacks:
            stack = ours.get(other.title)
            unfit = {*self._missing.get(model, ()), *self._surplus.get(model, ())}
            if stack is not None and stack.numbers != other.numbers:
                absent = {*stack.numbers} ^ {*other.numbers}
                if any(self._find_number(0, n) in absent or self._find_number(model, n) in absent for n in unfit):
                    yield stack, other

    def _explain_depth(self, model: int, stack: Stack, other: Stack) -> str:
        have, label = self._table.models[0].label, self._table.models[model].label
        lacking, extra = ({*a.numbers} - {*b.numbers} for a, b in ((stack, other), (other, stack)))
        layers = "1 layer" if other.layers == 1 else f"{other.layers} layers"
        counts = f"it has {layers} under {other.title!r}, {have} {stack.layers}"
        if not extra:
            return f"{_format_layers(lacking)} of {have} {_are(lacking)} missing from {label}: {counts}"
        advice = (
            f"take its layers 0 to {stack.layers - 1} with slices" if not lacking else "merge models of equal depth"
        )
        return f"{_format_layers(extra)} of {label} {_are(extra)} missing from {have}: {counts}; {advice}"

    def _find_number(self, model: int, name: str) -> int | None:
        place = self._table.layout(model).places.get(name)
        return place.number if place is not None else None

    def _is_in(self, model: int, name: str, stack: Stack, others: set[int]) -> bool:
        """Return whether a name is in a layer of a stack whose number the other model's stack does not have."""
        place = self._table.layout(model).places.get(name)
        return place is not None and place.stack.title == stack.title and place.number not in others

    def _group_names(self, names: Iterable[str], *models: int) -> Iterator[tuple[str, str, str]]:
        """Yield names that differ only in their layer number as one: the shown form, its verb and a glob."""
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self._find_pattern(name, models), []).append(name)
        for pattern, group in groups.items():
            if len(group) == 1:
                yield repr(group[0]), "is", group[0]
            else:
                yield f"{pattern!r} ({len(group)} tensors)", "are", pattern

    def _find_pattern(self, name: str, models: Iterable[int]) -> str:
        place = next((p for m in models if (p := self._table.layout(m).places.get(name))), None)
        if place is None:
            return name
        stack = place.stack
        return ".".join(part for part in (stack.prefix, f"{stack.stem}*", place.rest) if part)


def describe_shapes(
    table: SourceTable, found: Mapping[tuple[tuple[int, tuple[int, ...]], ...], Sequence[str]]
) -> Iterator[str]:
    """Yield one line for all tensors with the same unequal shapes in the same models."""
    for shapes, names in found.items():
        listed = ", ".join(f"{list(shape)} in {table.models[model].label}" for model, shape in shapes)
        others = f" and {len(names) - 1} more have" if len(names) > 1 else " has"
        yield f"{names[0]!r}{others} unequal shapes: {listed}"


def find_reasons(table: SourceTable, model: int) -> list[str]:
    """Return reasons from the configs why a model does not fit the template."""
    other = config_differences.describe_architectures(table, model)
    return [*([other] if other else []), *config_differences.describe_sizes(table, model)]


def _format_layers(numbers: Iterable[int]) -> str:
    """Return `layers 24 to 31`."""
    found = sorted(numbers)
    if len(found) == 1:
        return f"layer {found[0]}"
    run = found == list(range(found[0], found[-1] + 1))
    return f"layers {found[0]} to {found[-1]}" if run else "layers " + ", ".join(map(str, found))


def _are(numbers: Collection[int]) -> str:
    return "is" if len(numbers) == 1 else "are"
