"""Check that stacked layers have the tensors that the output's config expects; loaders drop or invent others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from merganser.errors import CheckpointError
from merganser.recipes.layer_kinds import Kinds
from merganser.recipes.stacking import Restacked

TensorNames = frozenset[str]
#: A layer of layers.
_STAGE = re.compile(r"^\d+\.|(^|\.)(layers?|blocks?)\.\d+\.")


def check_places(
    each: Restacked, kinds: Kinds, labels: Sequence[str], counts: Callable[[int, str], bool], why: Sequence[str]
) -> None:
    """Refuse layers without exactly the tensors that their place in the output requires.

    If the config distinguishes kinds of layers, a place requires the tensors of the template's layers of the same kind.
    Otherwise it requires those of the template's layer of that number, continuing the pattern beyond its depth.

    Args:
        each: The stack, with the names of the tensors in each layer.
        kinds: What the configs say about single layers.
        labels: The labels of the models; the first is the template's.
        counts: Whether a tensor counts, by its layer and its name after the number.
        why: An explanation of each model's difference from the template.

    Raises:
        CheckpointError: If a layer has a surplus tensor or lacks one.
    """
    before = [frozenset(n for n in names if counts(i, n)) for i, names in enumerate(each.before)]
    made = [frozenset(n for n in names if counts(k, n)) for k, names in enumerate(each.tensors)]
    expected = _expect_tensors(each, kinds, before, made)
    wrong = [k for k, names in enumerate(made) if names != expected[k]]
    if not wrong:
        return
    k = wrong[0]
    model, layer = each.order[k]
    has, lacks = sorted(made[k] - expected[k]), sorted(expected[k] - made[k])
    what = f"has {has[0]!r}" if has else f"lacks {lacks[0]!r}"
    more = f" (and {len(wrong) - 1} more layers do not fit)" if len(wrong) > 1 else ""
    raise CheckpointError(
        f"slices: layer {k} of the output is layer {layer} of {labels[model]}, which {what}; by the config of "
        f"{labels[0]} the layer in this place {'does not have it' if has else 'has it'}{more}{why[model]}; "
        "choose slices that keep layers of each kind in their places, or models of one architecture"
    )


def check_shapes(
    each: Restacked, kinds: Kinds, shape: Callable[[str], Sequence[int]], heads: object, outside: Iterable[str]
) -> None:
    """Refuse another order of layers where shapes depend on their number: stages of a vision model, contacts of ESM,
    embeddings with columns for every layer.

    Args:
        each: The stack.
        kinds: What the configs say about single layers.
        shape: Returns the shape of a tensor of the template.
        heads: The number of heads in a layer, if the config says it.
        outside: The tensors that are in no layer.

    Raises:
        CheckpointError: If a tensor has another shape in another layer of the same kind, or a column for each head of
            each layer.
    """
    seen: dict[tuple[str, str], tuple[str, Sequence[int]]] = {}
    for i, names in enumerate(each.before):
        for rest in names:
            own = each.stack.name(i, rest)
            # A list of widths in the config gives the kind of a stage, but not its place.
            key = (rest, "" if _STAGE.search(rest) else repr(kinds.of((0, i))))
            first, usual = seen.setdefault(key, (own, shape(own)))
            if shape(own) != usual:
                raise CheckpointError(
                    f"slices: {own!r} is {list(shape(own))} and {first!r} {list(usual)}: the stages under "
                    f"{each.stack.title!r} only fit their own places; keep their order"
                )
    moved = [number for _, number in each.order] != list(each.stack.numbers)
    for name in outside:
        columns = shape(name)[-1:]
        if moved and "per_layer" in name and len(shape(name)) > 1 and columns[0] % each.stack.layers == 0:
            raise CheckpointError(
                f"slices: {name!r} has columns for each of the {each.stack.layers} layers under {each.stack.title!r}, "
                "which only fit their own places; keep the order of the layers"
            )
        if "contact_head" in name and type(heads) is int and columns == (heads * each.stack.layers,):
            raise CheckpointError(
                f"slices: {name!r} has a column for each head of each of the {each.stack.layers} layers; leave it out "
                "with `output: {exclude: [...]}`"
            )


def _expect_tensors(
    each: Restacked, kinds: Kinds, before: Sequence[TensorNames], made: Sequence[TensorNames]
) -> list[TensorNames]:
    """Return the tensors that each layer of the output must have."""
    by_kind: dict[str, set[TensorNames]] = {}
    for i, names in enumerate(before):
        by_kind.setdefault(repr(kinds.of((0, i))), set()).add(names)
    if any(len(found) > 1 for found in by_kind.values()):
        return [continue_periodically(before, k) for k in range(len(made))]
    found = []
    for origin, names in zip(each.order, made, strict=True):
        like = by_kind.get(repr(kinds.of(origin)))
        # The template has no layer of this kind; accept it if one of its layers has these tensors.
        found.append(next(iter(like)) if like else names if names in before else before[0])
    return found


def continue_periodically(before: Sequence[TensorNames], place: int) -> TensorNames:
    """Return entry `place` of a sequence, continued periodically with the shortest beginning and period."""
    if place < len(before):
        return before[place]
    for length in range(1, len(before) + 1):
        for period in range(1, length + 1):
            start = length - period
            if all(before[i] == before[i - period] for i in range(length, len(before))):
                return before[start + (place - start) % period]
    return before[-1]
