"""Layouts: the names and shapes in which checkpoints of one architecture store its parameters.

Mixtral's experts are stored one by one or fused, the language part of a vision-language model has had several names,
and a model with a head adds a prefix to every name of the bare model. transformers can read all of these. Its
conversion tables run here on names and shapes alone (see `lazy_tensors`), so that a tensor of one layout is read from
the stored tensors of another, block by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text
from merganser.checkpoints.gguf_config import model_config
from merganser.checkpoints.lazy_tensors import LazyTensor, StoredTensor, find_stored_names
from merganser.checkpoints.scattering import scatter
from merganser.checkpoints.skeleton import build_skeleton
from merganser.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, nn


def module_tensors(checkpoint: Checkpoint, model: nn.Module) -> dict[str, LazyTensor]:
    """Return the stored tensors of a checkpoint as the parameters of its model.

    Args:
        checkpoint: A checkpoint in any layout that the installed transformers reads.
        model: The model, as `build_skeleton` returns it.

    Returns:
        Names of parameters -> tensors assembled from stored ones. Tensors that no module has keep their names.

    Raises:
        CheckpointError: If the stored tensors do not have the shapes that the conversion needs.

    Example:
        >>> module_tensors(open("mixtral"), skeleton)["model.layers.0.mlp.experts.down_proj"]  # doctest: +SKIP
        StackedTensors(...)
    """
    known = model.state_dict()
    rename, copies = _load_conversions(model, known)
    found: dict[str, LazyTensor] = {}
    converters: dict[str, Any] = {}
    for name in _sort_by_number(checkpoint.names()):
        target, pattern = rename(name)
        if target not in known and name in known:
            target, pattern = name, None
        if pattern is None or target not in known:
            found[target if target in known else name] = StoredTensor(checkpoint, name)
        else:
            converter = converters.setdefault(target, deepcopy(copies[pattern]))
            converter.add_tensor(target, name, pattern, StoredTensor(checkpoint, name))
    for target, converter in converters.items():
        try:
            made = converter.convert(target, model=model, config=model.config)
        except Exception as error:  # operations raise various errors for shapes they cannot combine
            raise CheckpointError(f"{checkpoint.label}: {target!r} cannot be assembled: {error}") from None
        for name, tensor in made.items():
            whole = tensor[0] if isinstance(tensor, list) else tensor
            if name in known and tuple(known[name].shape) != whole.shape:
                raise CheckpointError(
                    f"{checkpoint.label}: {name!r} would be {list(whole.shape)}, assembled from "
                    f"{len(find_stored_names(whole))} tensors, but its config requires {list(known[name].shape)}"
                )
            found[name] = whole
    return found


def _load_conversions(model: nn.Module, known: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return transformers' renaming of stored names to parameters, and its converters by their patterns."""
    prefix = getattr(model, "base_model_prefix", "")

    def plain(name: str) -> tuple[str, str | None]:
        bare = name.removeprefix(f"{prefix}.") if prefix else name
        return next((each for each in (name, bare, f"{prefix}.{name}") if each in known), name), None

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4 has no such tables
        return plain, {}
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        return target, pattern

    return rename, {pattern: each for each in converters for pattern in each.source_patterns}


def _sort_by_number(names: Sequence[str]) -> list[str]:
    """Return names sorted by their numbers: experts are stacked in this order."""
    return sorted(names, key=lambda name: [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")])


class InLayout(View):
    """A checkpoint under the names and shapes of another checkpoint's layout; other tensors keep their names."""

    def __init__(self, source: Checkpoint, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__(source, source.label)
        self._tensors = dict(tensors)
        used = {name for tensor in tensors.values() for name in find_stored_names(tensor)}
        self._names = [*self._tensors, *(name for name in source.names() if name not in used)]
        places = {t.name: name for name, t in self._tensors.items() if isinstance(t, StoredTensor)}
        self._aliases = {a: places.get(stored, stored) for a, stored in source.aliases().items()}

    def names(self) -> Sequence[str]:
        return self._names

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def spec(self, name: str) -> TensorSpec:
        tensor = self._tensors.get(self._aliases.get(name, name))
        if tensor is None:
            return self.source.spec(name)
        return TensorSpec(tensor.shape, self.source.spec(min(find_stored_names(tensor))).dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._tensors.get(self._aliases.get(name, name))
        return self.source.read(name, rows) if tensor is None else tensor.read(rows)

    def overhead(self, name: str, entries: int) -> int:
        tensor = self._tensors.get(name)
        if tensor is None:
            return super().overhead(name, entries)
        # Slices of a stored tensor may be read together with the data between them.
        return sum(self.source.spec(each).nbytes for each in find_stored_names(tensor))

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            super().prefetch(name, rows)
        elif isinstance(tensor, StoredTensor):
            self.source.prefetch(tensor.name, rows)

    def fingerprint(self) -> str:
        own = f"{self.source.fingerprint()} {' '.join(self._names)}"
        return hash_text(own)


def as_modules(checkpoint: Checkpoint, model: nn.Module) -> Checkpoint:
    """Return a checkpoint under the names and shapes of its model's parameters."""
    tensors = module_tensors(checkpoint, model)
    same = all(isinstance(tensor, StoredTensor) and tensor.name == name for name, tensor in tensors.items())
    return checkpoint if same else InLayout(checkpoint, tensors)


def convert_layout(template: Checkpoint, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint in the layout of another checkpoint of its architecture.

    Args:
        template: The checkpoint whose names and shapes to use.
        checkpoint: The checkpoint to convert.

    Returns:
        A view, or the checkpoint itself if the names agree or the architecture is unknown: no config, another
        `model_type`, or transformers is not installed.

    Raises:
        CheckpointError: If the stored tensors do not have the shapes that the conversion needs.

    Example:
        >>> convert_layout(open("fused"), open("one-by-one"))  # doctest: +SKIP
        <InLayout one-by-one: 27 tensors, ...>
    """
    theirs, ours = set(checkpoint.names()), set(template.names())
    if ours <= theirs or theirs <= ours:
        return checkpoint
    kinds = [model_config(each).get("model_type") for each in (template, checkpoint)]
    model = build_skeleton(template) if kinds[0] == kinds[1] else None
    if model is None:
        return checkpoint
    try:
        found = scatter(module_tensors(template, model), module_tensors(checkpoint, model))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.label} does not fit the layout of {template.label}: {error}") from None
    kept = {name: tensor for name, tensor in found.items() if name in ours}
    same = all(isinstance(tensor, StoredTensor) and tensor.name == name for name, tensor in kept.items())
    return checkpoint if same else InLayout(checkpoint, kept)
