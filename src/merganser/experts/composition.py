"""The merge of a set of experts as changes to a live module: low-rank updates beside linear layers, whole tensors
elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from merganser.checkpoints.base import is_integer
from merganser.errors import InputError, did_you_mean
from merganser.experts.activations import linear_layers
from merganser.experts.library import Library
from merganser.experts.views import Expert, MergedExperts
from merganser.kernels.spectra import polar
from merganser.methods.matrices import rank_kept


@dataclass(frozen=True)
class LowRank:
    """Δ = left · rightᵀ, so that W x = W₀ x + left (rightᵀ x)."""

    left: Tensor
    right: Tensor

    @property
    def per_row(self) -> int:
        """Multiply-adds of applying it to one row."""
        return self.left.numel() + self.right.numel()

    @property
    def to_build(self) -> int:
        """Multiply-adds of the product."""
        return self.left.shape[0] * self.right.numel()


@dataclass(frozen=True)
class Composition:
    """What a set of experts changes in a module. `multiply_adds` is what it took to work it out."""

    tasks: frozenset[str]
    low_rank: Mapping[str, LowRank]
    whole: Mapping[str, Tensor]
    multiply_adds: int = 0

    @property
    def nbytes(self) -> int:
        factors = sum(part.left.nbytes + part.right.nbytes for part in self.low_rank.values())
        return factors + sum(tensor.nbytes for tensor in self.whole.values())

    @property
    def per_row(self) -> int:
        """Multiply-adds the low-rank updates add to every row (token) of a forward pass."""
        return sum(part.per_row for part in self.low_rank.values())

    @property
    def to_build(self) -> int:
        """Multiply-adds of turning the low-rank updates into whole matrices."""
        return sum(part.to_build for part in self.low_rank.values())

    def materialised(self, base: Mapping[str, Tensor]) -> Composition:
        """The same with whole matrices."""
        built = {
            name: torch.addmm(base[name].detach(), part.left, part.right.T) for name, part in self.low_rank.items()
        }
        return replace(self, low_rank={}, whole={**self.whole, **built}, multiply_adds=self.to_build)


class Composer:
    """Works out compositions for one module from a library. The module has to hold the base's weights."""

    def __init__(self, module: nn.Module, library: Library, parameters: Mapping[str, Any], load_base: bool) -> None:
        self.library = library
        self.parameters = dict(parameters)
        self.tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        self.linears = {f"{name}.weight" for name in linear_layers(module)}
        self.stored = _stored_names(self.tensors, library)
        _match(self.tensors, self.stored, library, load_base)

    def compose(self, tasks: frozenset[str]) -> Composition:
        """The expert itself for one task, else TSV-Merge; the order of the tasks plays no part."""
        names = [name for name in self.library.experts if name in tasks]
        if len(names) == 1 and self.parameters.get("scale", 1.0) == 1.0:
            return self._single(names[0])
        merged = self.library.merge(names, **self.parameters)
        low_rank, whole, spent = {}, {}, 0
        for name in self._touched(merged.experts):
            stored = self.stored[name]
            experts = [e for e in merged.experts if stored in e.file.kinds and e.merges(stored)]
            matrix = merged.rule.applies(stored, tuple(self.tensors[name].shape))
            if matrix and self._factored(name, experts):
                low_rank[name] = self._merge_factors(name, merged, experts)
            else:
                whole[name] = self._like(name, merged.read(stored))
            if matrix:
                spent += self._cost(name, merged, experts, name in whole)
        return Composition(tasks, low_rank, whole, spent)

    def _single(self, task: str) -> Composition:
        expert = self.library.expert(task)
        low_rank, whole = {}, {}
        for name in self._touched([expert]):
            stored = self.stored[name]
            if self._factored(name, [expert]) and (factors := expert.factors(stored)) is not None:
                low_rank[name] = self._low_rank(name, factors.u * factors.s, factors.v)
            else:
                whole[name] = self._like(name, expert.read(stored))
        return Composition(frozenset([task]), low_rank, whole)

    def _merge_factors(self, name: str, merged: MergedExperts, experts: Sequence[Expert]) -> LowRank:
        """scale · U⊥ Σ and V⊥."""
        rule = merged.rule
        k = self._kept(name, merged)
        weights = dict(zip((e.name for e in merged.experts), rule.weight, strict=True))
        parts = []
        for expert in experts:
            factors = expert.factors(self.stored[name], k)
            assert factors is not None, "only experts that changed the tensor are asked"
            parts.append(factors._replace(s=factors.s * weights[expert.name]))
        u, s, v = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        if rule.orthogonalize != "none" and len(parts) > 1:
            u, v = (polar(side, rule.tolerance, rule.orthogonalize) for side in (u, v))
        return self._low_rank(name, rule.scale * u * s, v)

    def _kept(self, name: str, merged: MergedExperts) -> int:
        n = min(self.tensors[name].shape)
        return rank_kept(n, len(merged.experts), merged.rule.rank_fraction) if merged.rule.low_rank else n

    def _cost(self, name: str, merged: MergedExperts, experts: Sequence[Expert], whole: bool) -> int:
        """Multiply-adds of merging a matrix: of two polar factors (Gram matrix, product, and 9r³ for the eigenvectors),
        and of the product if it is wanted whole. Decomposing matrices the library keeps whole is not counted."""
        d, m = self.tensors[name].shape
        kept, cost = self._kept(name, merged), 0
        files = [(expert.file, self.stored[name]) for expert in experts]
        columns = sum(min(kept, f.rank(stored) if f.kinds[stored] == "factors" else d) for f, stored in files)
        if merged.rule.orthogonalize != "none" and len(experts) > 1:
            for side in (d, m):
                r = min(side, columns)
                cost += 2 * max(side, columns) * r * r + 9 * r**3
        return cost + (d * m * columns if whole else 0)

    def _touched(self, experts: Sequence[Expert]) -> Iterator[str]:
        for name, stored in self.stored.items():
            if any(stored in expert.file.kinds for expert in experts):
                yield name

    def _factored(self, name: str, experts: Sequence[Expert]) -> bool:
        """Whether updates beside the layer are possible, and not larger than its weight."""
        if name not in self.linears or not experts:
            return False
        files = [(expert.file, self.stored[name]) for expert in experts]
        if any(file.kinds[stored] != "factors" for file, stored in files):
            return False
        d, m = self.tensors[name].shape
        return sum(file.rank(stored) for file, stored in files) * (d + m) < d * m

    def _low_rank(self, name: str, left: Tensor, right: Tensor) -> LowRank:
        return LowRank(self._like(name, left), self._like(name, right))

    def _like(self, name: str, tensor: Tensor) -> Tensor:
        target = self.tensors[name]
        return tensor.to(device=target.device, dtype=target.dtype)


def _stored_names(tensors: Mapping[str, Tensor], library: Library) -> dict[str, str]:
    """The library's name of every tensor of the module that it has, tied tensors under each of their names."""
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
            raise InputError(f"{name!r} of the module is not the base's; load the base into it, or say load_base=True")


#: Modules with a composition in force: two at once would add up.
_IN_USE: WeakSet[nn.Module] = WeakSet()


@contextmanager
def applied(module: nn.Module, composition: Composition) -> Iterator[nn.Module]:
    """The module with a composition in force; as it was before, afterwards. Not for several threads at once."""
    if module in _IN_USE:
        raise InputError("the module runs with another set of experts at the moment; leave that one first")
    linears = linear_layers(module)
    undo: list[Callable[[], None]] = [lambda: _IN_USE.discard(module)]
    _IN_USE.add(module)
    try:
        for name, whole in composition.whole.items():
            undo.append(_swap(module, name, whole))
        for name, part in composition.low_rank.items():
            handle = linears[name.removesuffix(".weight")].register_forward_hook(_beside(part))
            undo.append(handle.remove)
        yield module
    finally:
        for step in undo:
            step()


def _swap(module: nn.Module, name: str, tensor: Tensor) -> Callable[[], None]:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    table: dict[str, Any] = owner._parameters if key in owner._parameters else owner._buffers
    original = table[key]
    table[key] = nn.Parameter(tensor, requires_grad=False) if isinstance(original, nn.Parameter) else tensor
    return lambda: table.__setitem__(key, original)


def _beside(part: LowRank) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        update: Tensor = (args[0] @ part.right) @ part.left.T
        return output + update

    return hook
