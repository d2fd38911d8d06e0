"""Permutations as index arrays: identity, random, inverse, composition, and their action on weights.

A set of permutations holds an int64 array for each atom, of shape (size,), or (sizes of ancestors…, size) when nested.
Convention: new position i takes the old unit p[i], `W_new[i] = W[p[i]]`; rows of a nested atom's array are indexed by
the **new** positions of its ancestors. Only gathers happen, so every map has an exact inverse, bit for bit. Atoms of
other groups have orthogonal matrices (…, size, size) instead, `W_new = R @ W`, exact up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from os import PathLike
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from merganser.align.blocks import blocks, composite, move
from merganser.align.state import State, check_symmetry, state_of
from merganser.align.symmetries import Atom, Symmetry
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.opening import Reference
from merganser.errors import InputError, did_you_mean
from merganser.kernels.assignment import Path, SymmetryGroup, rotate
from merganser.kernels.assignment import Permutations as Permutations
from merganser.kernels.linear_assignment import Index

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)


def identity(symmetry: Symmetry) -> Permutations:
    """Return the permutations that move nothing."""
    check_symmetry(symmetry)
    found: Permutations = {}
    for name, atom in symmetry.atoms.items():
        still = np.arange(atom.size, dtype=np.int64) if atom.group == "permutation" else np.eye(atom.size)
        found[name] = np.broadcast_to(still, symmetry.shape(name)).copy()
    return found


def random(symmetry: Symmetry, seed: int = 0) -> Permutations:
    """Return uniform random permutations and rotations, independent for every atom and every index of its ancestors."""
    generator = np.random.default_rng(seed)
    found = identity(symmetry)
    for name, still in found.items():
        if (group := symmetry.atoms[name].group) == "permutation":
            found[name] = generator.permuted(still, axis=-1)
        else:
            found[name] = random_rotations(generator, still.shape, group)
    return found


def random_rotations(
    generator: np.random.Generator, shape: tuple[int, ...], group: SymmetryGroup
) -> NDArray[np.float64]:
    """Return uniform random members of a group of orthogonal maps, as an array of this shape (…, size, size)."""
    found = generator.standard_normal(shape)
    for index in np.ndindex(shape[:-2]):
        found[index] = rotate(found[index], group)
    return found


def inverse(symmetry: Symmetry, permutations: Permutations) -> Permutations:
    """Return the inverse permutations: apply(inverse(p), apply(p, state)) == state."""
    check(symmetry, permutations)
    result: Permutations = {}
    for name, own in permutations.items():
        # The row for old parent position π(h) is the argsort of the row that now sits at h.
        rows = np.argsort(own, axis=-1) if _is_permutation(symmetry, name) else own.swapaxes(-1, -2)
        undone = np.empty_like(rows)
        undone[_find_old_rows(symmetry, name, permutations)] = rows
        result[name] = undone
    return result


def compose(symmetry: Symmetry, first: Permutations, then: Permutations) -> Permutations:
    """Return the permutations equal to applying `first`, then `then`."""
    check(symmetry, first)
    check(symmetry, then)
    result: Permutations = {}
    for name, own in then.items():
        before = first[name][_find_old_rows(symmetry, name, then)]
        result[name] = np.take_along_axis(before, own, axis=-1) if _is_permutation(symmetry, name) else own @ before
    return result


def _is_permutation(symmetry: Symmetry, name: str) -> bool:
    return symmetry.atoms[name].group == "permutation"


def _find_old_rows(symmetry: Symmetry, name: str, permutations: Permutations) -> tuple[Index, ...]:
    """Return the old positions of an atom's ancestors for every new position (an index of its array's rows)."""
    ancestors = symmetry.ancestors(name)
    new = np.indices([symmetry.atoms[a].size for a in ancestors], dtype=np.int64)
    return tuple(permutations[a][tuple(new[: depth + 1])] for depth, a in enumerate(ancestors))


def apply(symmetry: Symmetry, permutations: Permutations, state: Mapping[str, torch.Tensor]) -> State:
    """Return `state` with every axis gathered by its permutation: a new dict of any dtype; inputs are not changed."""
    return {
        name: moved.clone() if moved.data_ptr() == state[name].data_ptr() else moved
        for name, moved in _gather_tensors(symmetry, permutations, state)
    }


def permute_(symmetry: Symmetry, permutations: Permutations, state: Mapping[str, torch.Tensor]) -> None:
    """Permute the tensors of `state` in place, one after another; a tensor under several names is permuted once."""
    once = {id(tensor): name for name, tensor in state.items()}
    for name, moved in _gather_tensors(symmetry, permutations, {name: state[name] for name in once.values()}):
        if moved.data_ptr() != state[name].data_ptr():
            state[name].copy_(moved)


def _gather_tensors(
    symmetry: Symmetry, permutations: Permutations, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor with its axes gathered; one that does not move is returned unchanged."""
    check(symmetry, permutations)
    gathers: dict[Path, torch.Tensor] = {}
    for name, tensor in state.items():
        if name not in symmetry.axes:
            raise InputError(f"tensor {name!r} is not part of the symmetry{did_you_mean(name, symmetry.axes)}")
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{name!r} is no tensor but {type(tensor).__name__}")
        if tuple(tensor.shape) != (expected := symmetry.tensor_shape(name)):
            raise InputError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the symmetry was derived for {expected}"
            )
        moved = tensor.detach()
        if symmetry.free(name):
            moved = torch.empty_like(moved, memory_format=torch.contiguous_format)
            for block in blocks(symmetry, name):
                array = block.fold(tensor.detach())
                for axis, path in enumerate(block.paths):
                    if path not in gathers:
                        gathers[path] = torch.tensor(composite(symmetry, path, permutations))
                    array = move(array, axis, gathers[path])
                block.unfold(array, moved)
        yield name, moved


def check(symmetry: Symmetry, permutations: Permutations) -> None:
    """Check that every atom has an array of the right shape whose rows are permutations."""
    check_symmetry(symmetry)
    if not isinstance(permutations, Mapping):
        hint = "; give its .permutations" if hasattr(permutations, "permutations") else ""
        raise InputError(
            f"permutations are a dict with an array for each atom, not {type(permutations).__name__}{hint}"
        )
    if unknown := set(permutations) - set(symmetry.atoms):
        first = min(unknown)
        raise InputError(f"permutation of an unknown atom {first!r}{did_you_mean(first, symmetry.atoms)}")
    for name, atom in symmetry.atoms.items():
        if name not in permutations:
            raise InputError(f"no permutation for atom {name!r}")
        if (found := np.shape(permutations[name])) != (shape := symmetry.shape(name)):
            raise InputError(f"permutation of {name!r} has shape {found}, expected {shape}")
        if not _is_permutation(symmetry, name):
            _check_rotation(permutations[name], atom)
        elif not np.array_equal(np.sort(permutations[name], axis=-1), np.broadcast_to(np.arange(atom.size), shape)):
            raise InputError(f"permutation of {name!r} repeats an index or leaves one out")


def _check_rotation(rotation: NDArray[Any], atom: Atom) -> None:
    error = np.abs(rotation @ rotation.swapaxes(-1, -2) - np.eye(atom.size)).max()
    if atom.group == "centred":
        error = max(error, np.abs(rotation.sum(axis=-1) - 1.0).max())
    if not error <= 1e-6:
        raise InputError(f"the map of {atom.name!r} is not in its group ({atom.group}): off by {error:.1e}")


@overload
def scramble(model: AnyModule, symmetry: Symmetry, seed: int = 0) -> AnyModule: ...
@overload
def scramble(
    model: Checkpoint | Mapping[str, Any] | str | PathLike[str], symmetry: Symmetry, seed: int = 0
) -> State: ...
def scramble(model: Reference, symmetry: Symmetry, seed: int = 0) -> torch.nn.Module | State:
    """Return a randomly permuted copy of a model with the same function.

    Args:
        model: A module or a state dict; it is not changed.
        symmetry: The symmetry of the architecture, from `mg.align.symmetry`.
        seed: The seed of the permutations.

    Returns:
        A module for a module, else a state dict.

    Example:
        >>> twin = mg.align.scramble(base, mg.align.symmetry(base, images), seed=1)
        >>> torch.allclose(twin(images), base(images), atol=1e-5)
        True
    """
    moved = apply(symmetry, random(symmetry, seed), symmetry.canonical.of(state_of(model)))
    if not isinstance(model, torch.nn.Module):
        return moved
    copy = deepcopy(model)
    copy.load_state_dict(moved)
    return copy
