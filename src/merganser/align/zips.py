"""Zipping: combine units of several models, also of different widths, in all layers or up to one.

With groups of units (see `unit_groups`) every model i has a 0/1 matrix Z_i, (groups, units). Weights become

    W' = (Σ_i Z_i W_i V_iᵀ) / (Σ_i Z_i 1),

a mean over the units of a group where W writes and a sum where it reads (V_i are the groups of what is read). Units
that are nested or normalised together are matched one to one, which is the same with permutations for Z and V.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from merganser.align.activations import match_by_moments
from merganser.align.blocks import blocks, composite
from merganser.align.cross_moments import CrossMoments, unit_grams
from merganser.align.multi_head import MultiHead, tail_tensors
from merganser.align.permutations import Permutations, identity
from merganser.align.state import State, check_models, check_symmetry, states_of
from merganser.align.symmetries import Symmetry
from merganser.align.unit_groups import axis_dims, group_units, groupable, reads
from merganser.errors import InputError
from merganser.kernels.assignment import Path
from merganser.kernels.linear_assignment import Index
from merganser.modules.batches import InputsLike, reusable


@dataclass(frozen=True)
class Zip:
    """Models zipped into one network, with one head or with a head per model.

    Attributes:
        symmetry: The symmetry of the result.
        states: The weights; one set, or one for each model if the last layers stay separate.
        shared: The tensors that all of them have in common.
        groups: For every atom that was grouped and every model the group of each unit.
        notes: What to know about the result.

    Example:
        >>> zipped = mg.align.zip(models[:2], mg.align.symmetry(models[0], images), [images])
        >>> base.load_state_dict(zipped.merged())
        <All keys matched successfully>
    """

    symmetry: Symmetry
    states: tuple[State, ...]
    shared: frozenset[str]
    groups: Mapping[str, tuple[Index, ...]]
    notes: tuple[str, ...] = ()

    def merged(self) -> State:
        """Return the weights of the one network.

        Raises:
            InputError: The result has several heads; `module` makes a network of them.
        """
        if len(self.states) > 1:
            raise InputError(f"the result has {len(self.states)} heads; module(template) makes a network from them")
        return self.states[0]

    def module(self, template: nn.Module) -> nn.Module:
        """Return the result as a module: `template` with the weights, or `MultiHead` if there are several heads.

        Args:
            template: A network of the result's architecture; it is not changed.
        """
        return MultiHead.of(template, self.states, self.shared)


def zip(
    models: Sequence[nn.Module],
    symmetry: Symmetry | Sequence[Symmetry],
    batches: Iterable[InputsLike],
    *,
    into: Symmetry | None = None,
    until: str | None = None,
) -> Zip:
    """Zip models: combine units that respond alike, within a model or across models (ZipIt).

    Args:
        models: Modules with the same layers; widths may differ.
        symmetry: Their symmetry, or one for each model if their widths differ.
        batches: Inputs to compare activations on; targets beside them are left out.
        into: The symmetry of the network to make, of any width up to the sum of all; by default the widest model's.
        until: The first layer, by name, that stays separate, with all that run after it: the result has a head for
            each model. Without it everything is zipped.

    Returns:
        The zipped weights.

    Raises:
        InputError: The models do not fit the symmetries, or units that cannot be grouped differ in number.

    Example:
        >>> zipped = mg.align.zip(models[:2], mg.align.symmetry(models[0], images), [images], until="4")
        >>> one, two = zipped.module(base)(images)
    """
    check_models(models)
    models, batches = list(models), reusable(batches, "batches")
    symmetries = [symmetry] * len(models) if isinstance(symmetry, Symmetry) else list(symmetry)
    _check(models, symmetries, into)
    states = [states_of([model], own)[0] for model, own in builtins.zip(models, symmetries, strict=True)]
    result = into or max(symmetries, key=lambda s: sum(atom.size for atom in s.atoms.values()))
    tail = tail_tensors(models[0], batches, until) if until is not None else frozenset()
    for alias, name in symmetries[0].aliases.items():
        if (alias in tail) != (name in tail):
            raise InputError(f"{alias!r} and {name!r} are one weight, but only one of them would stay separate")
    maps = _find_maps(models, states, symmetries, result, batches, tail)
    count = len(models) if until is not None else 1
    merge = partial(_merge_tensor, models, states, symmetries, result, maps)
    shared = {name: merge(name, range(len(models))) for name in states[0] if name not in tail}
    made = tuple({n: shared[n] if n in shared else merge(n, [head]) for n in states[0]} for head in range(count))
    return Zip(result, made, frozenset(shared), maps.groups, tuple(maps.notes))


@dataclass
class _Maps:
    """The target of every unit of every model: groups for grouped atoms, permutations for the others."""

    symmetries: Sequence[Symmetry]
    groups: dict[str, tuple[Index, ...]]
    permutations: Sequence[Permutations]
    notes: list[str] = field(default_factory=list)

    def places(self, path: Path, model: int) -> Tensor:
        """Return the target of every unit of a path."""
        if path[0] in self.groups:
            return torch.from_numpy(self.groups[path[0]][model])
        return torch.from_numpy(np.argsort(composite(self.symmetries[model], path, self.permutations[model])))


def _find_maps(
    models: Sequence[nn.Module],
    states: Sequence[State],
    symmetries: Sequence[Symmetry],
    result: Symmetry,
    batches: Iterable[InputsLike],
    tail: frozenset[str],
) -> _Maps:
    first = next(iter(batches), None)
    if first is None:
        raise InputError("no batch was seen; an iterator is exhausted after one pass: give a list or a data loader")
    separate = {atom for atom, places in result.occurrences.items() if all(name in tail for name, _ in places)}
    alone = groupable(models[0], symmetries[0], first)
    grams = unit_grams(models, symmetries, batches, standardize=True)
    groups: dict[str, tuple[Index, ...]] = {}
    single = []
    for tree in result.trees.values():
        sizes = [own.atoms[tree.name].size for own in symmetries]
        if tree.name not in separate and alone.get(tree.name) and (tree.name,) in grams:
            if tree.size > sum(sizes):
                raise InputError(f"{tree.name!r} would get {tree.size} units of {sum(sizes)} that the models have")
            ends = list(accumulate(sizes))[:-1]
            groups[tree.name] = tuple(np.split(group_units(grams[tree.name,], tree.size), ends))
        else:
            single.append(tree.name)
            below = [node.name for node in tree.walk()]
            if any(own.shape(name) != result.shape(name) for own in symmetries for name in below):
                raise InputError(
                    f"the units of {tree.name!r} cannot be grouped (they are nested, normalised together, or stay "
                    f"separate): they must be as many in every model and in the result, not {[*sizes, tree.size]}"
                )
    permutations = [identity(own) for own in symmetries]
    matched = [name for name in single if name not in separate]
    if matched:
        common = _find_common(symmetries)
        shown = {path: gram for path, gram in grams.items() if path[0] in common.atoms}
        moments = CrossMoments(common, len(models), shown)
        own = {node.name for name in matched for node in result.trees[name].walk()}
        for i in range(1, len(models)):
            found = match_by_moments(moments, i, [states[0], states[i]]).permutations
            permutations[i] |= {name: order for name, order in found.items() if name in own}
    notes = [f"matched one to one, not grouped: {', '.join(matched)}"] if matched else []
    return _Maps(symmetries, groups, permutations, notes)


def _find_common(symmetries: Sequence[Symmetry]) -> Symmetry:
    """Return the atoms of which all models have as many units, and the tensors with no others."""
    first = symmetries[0]
    unequal = {name for name in first.atoms if len({own.shape(name) for own in symmetries}) > 1}
    same = {name: axes for name, axes in first.axes.items() if not first.free(name) & unequal}
    return replace(first, atoms={n: atom for n, atom in first.atoms.items() if n not in unequal}, axes=same, causes={})


def _merge_tensor(
    models: Sequence[nn.Module],
    states: Sequence[State],
    symmetries: Sequence[Symmetry],
    result: Symmetry,
    maps: _Maps,
    name: str,
    members: Sequence[int],
) -> Tensor:
    """Return one tensor of the result from those of some models."""
    first = states[members[0]][name]
    if not (first.is_floating_point() or first.is_complex()):
        return first.clone()
    made = first.new_zeros(result.tensor_shape(name))
    own = [list(blocks(symmetries[i], name)) for i in members]
    for place, target in enumerate(blocks(result, name)):
        total = torch.zeros(target.shape, dtype=torch.promote_types(first.dtype, torch.float64))
        count = torch.zeros(target.shape[:-1] or (1,), dtype=torch.float64)
        for i, mine in builtins.zip(members, own, strict=True):
            array = mine[place].fold(states[i][name]).to(total)
            share = torch.ones(array.shape[:-1] or (1,), dtype=torch.float64)
            for axis, (path, dim) in enumerate(builtins.zip(target.paths, axis_dims(target), strict=True)):
                goes, size = maps.places(path, i), target.shape[axis]
                array = _gather(array, axis, goes, size)
                share = _spread(share, axis, size) if reads(models[0], name, dim) else _gather(share, axis, goes, size)
            total += array
            count += share
        divisor = count.clamp_min(1.0).unsqueeze(-1) if target.paths else count
        target.unfold((total / divisor).to(first.dtype), made)
    return made


def _gather(array: Tensor, axis: int, goes: Tensor, size: int) -> Tensor:
    """Sum entries with the same target along an axis."""
    shape = [*array.shape]
    shape[axis] = size
    return torch.zeros(shape, dtype=array.dtype).index_add_(axis, goes, array)


def _spread(share: Tensor, axis: int, size: int) -> Tensor:
    """Return a share that does not depend on the input."""
    return share.select(axis, 0).unsqueeze(axis).expand(*share.shape[:axis], size, *share.shape[axis + 1 :])


def _outline_layers(symmetry: Symmetry) -> dict[str, list[list[tuple[str | int, ...]]]]:
    """Return the layers of an architecture, of any width: for every axis its atoms and the sizes of what is pinned."""
    return {
        name: [[tuple(f.atom or f.size for f in segment.factors) for segment in axis] for axis in axes]
        for name, axes in symmetry.axes.items()
    }


def _check(models: Sequence[nn.Module], symmetries: Sequence[Symmetry], into: Symmetry | None) -> None:
    if len(models) < 2 or not all(isinstance(model, nn.Module) for model in models):
        raise InputError("zipping needs two or more modules, not weights")
    if len(symmetries) != len(models):
        raise InputError(f"{len(models)} models need a symmetry each, or one for all, not {len(symmetries)}")
    labelled = [(f"model {place}", own) for place, own in enumerate(symmetries)]
    for label, own in labelled if into is None else [*labelled, ("the result", into)]:
        check_symmetry(own)
        if rotated := next((atom.name for atom in own.atoms.values() if atom.group != "permutation"), None):
            raise InputError(f"{rotated!r} is rotated, but zipping groups units; derive symmetries of permutations")
        if _outline_layers(own) != _outline_layers(symmetries[0]):
            raise InputError(f"{label} has different layers from model 0; only widths may differ")
