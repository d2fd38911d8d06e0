"""The merge of a set of experts as changes to a live module: low-rank updates of layers, whole tensors elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from merganser.checkpoints.base import is_integer
from merganser.errors import InputError, did_you_mean
from merganser.kernels.polar import FLOAT32_LIMIT
from merganser.library.library import Library
from merganser.library.unfolding import as_matrix
from merganser.library.views import Expert, MergedExperts
from merganser.methods.matrices import matrix_shape
from merganser.modules.activations import Layer, fused_layers, matrix_layers
from merganser.modules.convolutions import convolve
from merganser.modules.moments import evaluating
from merganser.routing.cores import core_of
from merganser.routing.layer_updates import add_updates


@dataclass(frozen=True)
class LowRankUpdate:
    """Δ = L C Rᵀ with L = [left …] and R = [right …], so that W x = W₀ x + L (C (Rᵀ x)). A vector C is a diagonal.

    The factors belong to the experts and are shared by all sets; only C belongs to the set. All are at least float32,
    because C amplifies rounding errors of the factors.
    """

    left: tuple[Tensor, ...]
    core: Tensor
    right: tuple[Tensor, ...]

    @property
    def per_row(self) -> int:
        """Return the multiply-adds of applying it to one row."""
        core = self.core.numel() if self.core.dim() == 2 else 0
        return core + sum(factor.numel() for factor in (*self.left, *self.right))

    @property
    def to_build(self) -> int:
        """Return the multiply-adds of the product."""
        d, m, r = self.left[0].shape[0], self.right[0].shape[0], self.core.shape[0]
        return d * m * r + (d * r * r if self.core.dim() == 2 else 0)

    def applied_to(self, x: Tensor, layer: Layer) -> Tensor:
        """Return L (C (Rᵀ x)) for the input rows x of a linear layer, or for the patches of a convolution."""
        kind, x = x.dtype, x.to(self.core.dtype)
        if isinstance(layer, nn.Linear):
            return self._raised(torch.cat([x @ factor for factor in self.right], dim=-1)).to(kind)
        z = torch.cat([convolve(layer, x, factor.T) for factor in self.right], dim=1)
        return self._raised(z.movedim(1, -1)).movedim(-1, 1).to(kind)

    def _raised(self, z: Tensor) -> Tensor:
        """Return L (C z)."""
        z = z * self.core if self.core.dim() == 1 else z @ self.core.T
        update, start = z.new_zeros(()), 0
        for factor in self.left:
            stop = start + factor.shape[1]
            update, start = update + z[..., start:stop] @ factor.T, stop
        return update

    def added_to(self, base: Tensor) -> Tensor:
        """Return base + Δ, in the base's shape."""
        left = torch.cat(self.left, dim=1)
        left = left * self.core if self.core.dim() == 1 else left @ self.core
        whole = torch.addmm(as_matrix(base).to(left.dtype), left, torch.cat(self.right, dim=1).T)
        return whole.to(base.dtype).view(base.shape)


@dataclass(frozen=True)
class Composition:
    """The changes of a set of experts to a module."""

    tasks: frozenset[str]
    low_rank: Mapping[str, LowRankUpdate]
    whole: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Return the bytes of keeping it, without the factors, which are shared."""
        cores = sum(part.core.nbytes for part in self.low_rank.values())
        return cores + sum(tensor.nbytes for tensor in self.whole.values())

    @property
    def per_row(self) -> int:
        """Return the multiply-adds that the low-rank updates add to every row (token) of a forward pass."""
        return sum(part.per_row for part in self.low_rank.values())

    @property
    def to_build(self) -> int:
        """Return the multiply-adds of building whole matrices from the low-rank updates."""
        return sum(part.to_build for part in self.low_rank.values())

    def materialized(self, base: Mapping[str, Tensor]) -> Composition:
        """Return the same composition with whole matrices."""
        built = {name: part.added_to(base[name].detach()) for name, part in self.low_rank.items()}
        return replace(self, low_rank={}, whole={**self.whole, **built})


class Composer:
    """Computes compositions for one module from a library. The module must hold the base's weights."""

    def __init__(self, module: nn.Module, library: Library, parameters: Mapping[str, Any], load_base: bool) -> None:
        self.library = library
        self.parameters = dict(parameters)
        library.merge(library.experts[:1], **self.parameters)  # validates the parameters
        self.module = module
        self._owners = _owners(module)
        self.tensors = _current(self._owners)
        #: Increases whenever the module is moved or cast; compositions for earlier versions are invalid.
        self.version = 0
        self._places = _places(self.tensors)
        #: Weights of layers that are called, so that an update beside them takes effect.
        self.called = {f"{name}.weight" for name in matrix_layers(module).keys() - fused_layers(module)}
        self.stored = _stored_names(self.tensors, library)
        self._vectors: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        _match(self.tensors, self.stored, library, load_base)

    def follow(self) -> int:
        """Detect that the module was moved or cast; return its version."""
        check_free(self.module)
        tensors = _current(self._owners)
        if (places := _places(tensors)) != self._places:
            self.tensors, self._places = tensors, places
            self._vectors.clear()
            self.version += 1
        return self.version

    def verify(self) -> None:
        """Refuse a module that no longer has the base's weights."""
        self.follow()
        _match(self.tensors, self.stored, self.library, load_base=False)

    def compose(self, tasks: frozenset[str]) -> Composition:
        """Return the expert itself for one task, else TSV-Merge; independent of the order of the tasks."""
        names = [name for name in self.library.experts if name in tasks]
        merged = self.library.merge(names, **self.parameters)
        if single := (merged.rule.scale, merged.rule.weight) == (1.0, (1.0,)):
            merged = self.library.merge(names, low_rank=False)
        low_rank, whole = {}, {}
        for name in self._touched(merged.experts):
            update = self._update(name, merged) if self._factored(name, merged) else None
            if update is not None:
                low_rank[name] = update
            else:
                source = merged.experts[0] if single else merged
                whole[name] = self._like(name, source.read(self.stored[name]))
        return Composition(tasks, low_rank, whole)

    def _update(self, name: str, merged: MergedExperts) -> LowRankUpdate | None:
        """Return the merge as a core between the experts' factors, or None if they are too close to parallel."""
        stored = self.stored[name]
        experts, factors = merged.changing(stored), merged.factors(stored)
        core, amplification = core_of(factors, merged.rule)
        if amplification > FLOAT32_LIMIT:
            return None
        kept = [self._shared(expert, name) for expert in experts]
        left, right = zip(
            *((u[:, : f.rank], v[:, : f.rank]) for (u, v), f in zip(kept, factors, strict=True)), strict=True
        )
        return LowRankUpdate(left, self._wide(name, core), right)

    def _shared(self, expert: Expert, name: str) -> tuple[Tensor, Tensor]:
        """Return an expert's singular vectors in the module's dtype and device; cached."""
        if (expert.name, name) not in self._vectors:
            found = expert.file.factors(self.stored[name])
            self._vectors[expert.name, name] = (self._wide(name, found.u), self._wide(name, found.v))
        return self._vectors[expert.name, name]

    def _touched(self, experts: Sequence[Expert]) -> Iterator[str]:
        for name, stored in self.stored.items():
            if any(stored in expert.file.kinds for expert in experts):
                yield name

    def _factored(self, name: str, merged: MergedExperts) -> bool:
        """Return whether updates beside the layer are possible and cheaper than its weight."""
        stored = self.stored[name]
        experts = merged.changing(stored)
        if name not in self.called or not experts or not merged.is_factored(stored):
            return False
        if any(expert.file.kinds[stored] != "factors" for expert in experts):
            return False
        d, m = matrix_shape(tuple(self.tensors[name].shape))
        r = sum(min(merged.rank_of(stored), expert.file.rank(stored)) for expert in experts)
        return r * (d + m) + (r * r if len(experts) > 1 else 0) < d * m

    def _wide(self, name: str, tensor: Tensor) -> Tensor:
        target = self.tensors[name]
        return tensor.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        target = self.tensors[name]
        return tensor.to(device=target.device, dtype=target.dtype)


def _owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the submodule of every parameter and buffer, and its name there."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers()]
    return {name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}


def _current(owners: Mapping[str, tuple[nn.Module, str]]) -> dict[str, Tensor]:
    found: dict[str, Any] = {
        name: owner._parameters[key] if key in owner._parameters else owner._buffers[key]
        for name, (owner, key) in owners.items()
    }
    if empty := [name for name, tensor in found.items() if tensor.is_meta]:
        raise InputError(f"{empty[0]!r} of the module is on the meta device and has no values; load the base's weights")
    return found


def _places(tensors: Mapping[str, Tensor]) -> list[tuple[int, torch.device, torch.dtype]]:
    return [(id(tensor), tensor.device, tensor.dtype) for tensor in tensors.values()]


def _stored_names(tensors: Mapping[str, Tensor], library: Library) -> dict[str, str]:
    """Return the library's name of every tensor of the module; tied tensors under each of their names."""
    base = library.base
    stored = {name: base.aliases().get(name, name) for name in tensors if name in base}
    by_identity = {id(tensors[name]): found for name, found in stored.items()}
    tied = {name: by_identity[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_identity}
    return {name: stored.get(name, tied.get(name, name)) for name in tensors if name in stored or name in tied}


def _match(tensors: Mapping[str, Tensor], stored: Mapping[str, str], library: Library, load_base: bool) -> None:
    """Check that the module has the tensors the experts change, with the base's shapes and weights."""
    base, there = library.base, set(stored.values())
    for expert in map(library.expert, library.experts):
        for name in expert.file.kinds:
            if name in base and name not in there:
                raise InputError(f"the module has no tensor {name!r} of the library{did_you_mean(name, tensors)}")
    for name, found in stored.items():
        tensor, spec = tensors[name], base.spec(found)
        if tuple(tensor.shape) != spec.shape:
            raise InputError(f"{name!r} has shape {list(tensor.shape)} in the module, {list(spec.shape)} in the base")
        if is_integer(spec.dtype):
            continue
        weights = base.read(found).to(tensor)
        if load_base:
            with torch.no_grad():
                tensor.copy_(weights)
        elif not torch.equal(tensor.detach(), weights):
            raise InputError(f"{name!r} of the module is not the base's; load the base into it, or pass load_base=True")


#: Modules with an active composition: two at once would add up.
_IN_USE: WeakSet[nn.Module] = WeakSet()


def check_free(module: nn.Module) -> None:
    """Refuse a module with an active composition."""
    if module in _IN_USE:
        raise InputError("the module is in use with another set of experts; leave that context first")


@contextmanager
def applied(module: nn.Module, composition: Composition) -> Iterator[set[str]]:
    """Apply a composition to the module in evaluation mode, and restore the module on exit. Not thread-safe.

    Yields the tensors with a low-rank update that were read without a call of their layer.
    """
    check_free(module)
    called = matrix_layers(module)
    layers = {name: called[name.removesuffix(".weight")] for name in composition.low_rank}
    with ExitStack() as undo:
        _IN_USE.add(module)
        undo.callback(_IN_USE.discard, module)
        for name, whole in composition.whole.items():
            undo.callback(_swap(module, name, whole))
        read = undo.enter_context(
            add_updates(layers, lambda name, x: composition.low_rank[name].applied_to(x, layers[name]))
        )
        undo.enter_context(evaluating(module))
        yield read


def _swap(module: nn.Module, name: str, tensor: Tensor) -> Callable[[], None]:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    table: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
    original = table[key]
    table[key] = nn.Parameter(tensor, requires_grad=False) if isinstance(original, nn.Parameter) else tensor
    return lambda: table.__setitem__(key, original)
