"""An adapter over its base as a checkpoint, applied tensor by tensor without a full copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merganser.checkpoints.adapter_file import AdapterFile
from merganser.checkpoints.adapter_kohya import LoraFile
from merganser.checkpoints.adapter_peft import PeftLayers, PeftTensor
from merganser.checkpoints.adapter_updates import AdapterUpdate, Ia3Update, TokenUpdate, UpdatedTensor
from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, hash_text, views
from merganser.checkpoints.hashing import content_hash
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.kinds import is_adapter
from merganser.checkpoints.layouts import module_tensors
from merganser.checkpoints.lazy_tensors import LazyTensor, StoredTensor, find_stored_names
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.remote.downloads import is_download
from merganser.checkpoints.scattering import scatter
from merganser.checkpoints.skeleton import build_from_config, build_plain_skeleton, build_skeleton
from merganser.checkpoints.ties import check_head_is_known, check_separable, ties
from merganser.errors import CheckpointError, did_you_mean
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

#: A weight of the base -> the weight with the adapter.
_Change = Callable[[LazyTensor], LazyTensor]


class Adapted(View):
    """`base + adapter` as a checkpoint. Changed tensors are read in float32 and rounded once, when written."""

    adapts = True

    def __init__(self, base: Checkpoint, adapter: AdapterFile | LoraFile) -> None:
        super().__init__(base, f"{base.label}+{adapter.path}")
        self.adapter = adapter
        self._ties = ties(base)
        #: Stored or tied names of the base -> the adapter's update of them, or its replacement.
        self._changes: dict[str, _Change] = {}
        self._replaced: dict[str, LazyTensor] = {}
        self._trained_whole: set[str] = set()
        #: Changes that keep a head tied to the changed embedding.
        self._shared: dict[str, AdapterUpdate] = {}
        #: Stored tensors that contain changed parameters in another layout.
        self._converted: dict[str, LazyTensor] = {}
        if not adapter.needs_peft and self._find_all():
            self._apply()
        else:
            self._apply_peft()
        self._separate()
        for target in (*self._changes, *self._replaced):
            if self._is_trained(target) and target not in {*self._ties, *self._ties.values()}:
                check_head_is_known(base, target, str(adapter.path))
        self._tensors = {name: self._tensor(name) for name in (*self._changes, *self._replaced)} | self._converted

    # Changes that the adapter's own names describe.

    def _find_all(self) -> bool:
        """Return whether every parameter that the adapter changes is found; if not, PEFT may know another name for
        it.
        """
        lacking = [name for name in (*self.adapter.updates, *self.adapter.replaced) if self._lacks(name)]
        if lacking and (self._model is None or not self.adapter.updates):
            raise self._missing(lacking[0])
        return not lacking

    def _lacks(self, name: str) -> bool:
        optional = isinstance(update := self.adapter.updates.get(name), Ia3Update) and update.bias
        return self.stored_name(name) is None and name not in self._parameters and not optional

    def _apply(self) -> None:
        for name, update in self.adapter.updates.items():
            target = self.stored_name(name)
            if target is None and name not in self._parameters:
                continue
            weight = self._parameters[name] if target is None else self._weight(target)
            if name in self.adapter.replaced:
                weight = StoredTensor(self.adapter.weights, self.adapter.replaced[name])
            change = functools.partial(UpdatedTensor, update=update, turned=self._is_turned(name, update, weight.shape))
            if target is None:
                self._converted |= scatter(self._parameters, {name: change(weight)})
                continue
            self._changes[target] = change
            if isinstance(update, TokenUpdate):
                self._shared[target] = update
        for name, file_name in self.adapter.replaced.items():
            target = self.stored_name(name)
            whole = StoredTensor(self.adapter.weights, file_name)
            if target is not None:
                self._replace(target, whole, self.adapter.trains_whole(name))
            elif name not in self.adapter.updates:
                self._converted |= scatter(self._parameters, {name: whole})

    def _replace(self, target: str, whole: LazyTensor, trained: bool) -> None:
        self._replaced[target] = whole
        if trained:
            self._trained_whole.add(target)

    def _is_turned(self, name: str, update: AdapterUpdate, shape: tuple[int, ...]) -> bool:
        """Return whether a weight is stored input × output; for square ones the model's class decides."""
        plain, turned = update.fits(shape)
        if not plain and not turned:
            found = list(update.shapes()[0])
            raise CheckpointError(f"{self.adapter.path}: {name!r} fits {found}, the base has {list(shape)}")
        if plain != turned:
            return turned
        try:
            kind = type(self._model.get_submodule(name.rpartition(".")[0])).__name__ if self._model else ""
        except AttributeError:
            kind = ""
        return kind == "Conv1D" if kind else bool(self.adapter.config.get("fan_in_fan_out"))

    # Changes that PEFT reports.

    def _apply_peft(self) -> None:
        if isinstance(self.adapter, LoraFile):
            raise self._missing(next(iter(self.adapter.updates)))
        config = read_config(self.source.directory)
        model = build_from_config(config) if config else build_plain_skeleton(self.source, self.adapter.embeddings())
        if model is None:
            why = self.adapter.needs_peft or "names weights differently from its base"
            raise CheckpointError(
                f"{self.adapter.path}: {why}, which needs the modules of {self.source.label}; transformers is not "
                "installed or does not know its architecture"
            )
        layers = PeftLayers(self.adapter, model)
        base = {name: self._parameter(name) for names in layers.layers.values() for name in names}
        for path, names in layers.layers.items():
            for name in names:
                self._change_parameter(name, PeftTensor(layers, path, name, base))
        for name, tensor in layers.saved.items():
            whole = StoredTensor(StateDict({name: tensor.contiguous()}), name)
            target = self.stored_name(name)
            if target is not None and target not in self._changes:
                self._replace(target, whole, name in layers.trained)
            elif target is None:
                self._change_parameter(name, whole)

    def _parameter(self, name: str) -> LazyTensor:
        target = self.stored_name(name)
        if target is None and name not in self._parameters:
            raise self._missing(name)
        return self._parameters[name] if target is None else self._weight(target)

    def _change_parameter(self, name: str, tensor: LazyTensor) -> None:
        target = self.stored_name(name)
        if target is not None:
            self._changes[target] = lambda _: tensor
        elif name in self._parameters:
            self._converted |= scatter(self._parameters, {name: tensor})
        else:
            raise self._missing(name)

    # Names.

    @functools.cached_property
    def _model(self) -> nn.Module | None:
        return build_skeleton(self.source)

    @functools.cached_property
    def _parameters(self) -> dict[str, LazyTensor]:
        """Return the base's tensors by the names of its modules; empty if these are unknown."""
        return module_tensors(self.source, self._model) if self._model is not None else {}

    def stored_name(self, name: str) -> str | None:
        """Return the base's stored or tied name of a weight; None if it has none.

        An adapter of a `ForCausalLM` class may be over a bare model, and vice versa.
        """
        for candidate in (name, name.removeprefix("model."), f"model.{name}"):
            if candidate in self.source or candidate in self._ties:
                return candidate
        return None

    def _weight(self, target: str) -> LazyTensor:
        """Return the base's weight of a stored or tied name."""
        return StoredTensor(self.source, self._ties.get(target, target))

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.adapter.path}: changes {name!r}, which {self.source.label} does not have"
            f"{did_you_mean(name, self.source.names())}"
        )

    def resolve(self, target: str, checkpoint: Checkpoint) -> str:
        """Return the name under which the base, or this, has the weight of a stored or tied name."""
        return target if target in checkpoint else self._ties[target]

    # Heads that are tied to embeddings.

    def _separate(self) -> None:
        self.untied = {tied: stored for tied, stored in self._ties.items() if self._must_separate(tied, stored)}
        self._tied = {tied: stored for tied, stored in self.source.aliases().items() if tied not in self.untied}
        for tied, stored in self._ties.items():
            for name, other in ((tied, stored), (stored, tied)):  # one tensor, saved under one of its names
                if (
                    name in self._replaced
                    and name not in self._trained_whole
                    and (other in self.source or other in self.untied)
                ):
                    self._replaced.setdefault(other, self._replaced[name])
            if tied not in self.untied and tied in self._shared:
                self._changes.setdefault(stored, self._changes[tied])
        for name in [name for name in (*self._changes, *self._replaced) if name not in self.source]:
            if name not in self.untied:
                self._changes.pop(name, None)
                self._replaced.pop(name, None)
        self._names = [*self.source.names(), *(name for name in self.untied if name not in self.source.names())]

    def _must_separate(self, tied: str, stored: str) -> bool:
        """Return whether two names of one tensor have different weights with the adapter."""
        changed = {name for name in (tied, stored) if name in self._changes}
        both = [self._replaced[name] for name in (tied, stored) if name in self._replaced]
        if changed and changed <= self._shared.keys() and self._agree(changed):
            changed = set()
        trained = changed | ({tied, stored} & self._trained_whole)
        same = len(both) == 2 and not changed and _equal(*both)
        if same or (not trained and len(both) < 2):
            return False
        check_separable(self.source, tied, stored, str(self.adapter.path))
        return True

    def _agree(self, names: set[str]) -> bool:
        """Return whether trained tokens of an embedding and its head agree; PEFT trains both if it trains one."""
        updates = [self._shared[name] for name in names]
        return all(
            isinstance(each, TokenUpdate)
            and each.tokens == updates[0].tokens  # type: ignore[attr-defined]
            and torch.equal(each.read("trainable_tokens_delta"), updates[0].read("trainable_tokens_delta"))
            for each in updates
        )

    def _is_trained(self, target: str) -> bool:
        return target in self._trained_whole or (target in self._changes and target not in self._shared)

    # The checkpoint.

    def _tensor(self, name: str) -> LazyTensor:
        whole = self._replaced.get(name)
        weight = self._weight(name) if whole is None else whole
        change = self._changes.get(name)
        return weight if change is None else change(weight)

    def names(self) -> Sequence[str]:
        return self._names

    def aliases(self) -> Mapping[str, str]:
        return self._tied

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype; a tensor saved whole may have rows for added tokens."""
        stored = self._tied.get(name, name)
        spec = self.source.spec(self.untied.get(stored, stored))
        return TensorSpec(self._tensors[stored].shape, spec.dtype) if stored in self._tensors else spec

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self._tied.get(name, name)
        if stored in self._tensors:
            return self._tensors[stored].read(rows)
        return self.source.read(self.untied.get(stored, stored), rows)

    def overhead(self, name: str, entries: int) -> int:
        """Return the overhead: PEFT merges whole layers, and parameters in another layout are read whole."""
        tensor = self._tensors.get(self._tied.get(name, name))
        if tensor is None or isinstance(tensor, StoredTensor | UpdatedTensor):
            return super().overhead(name, entries)
        return 3 * sum(4 * self.source.spec(each).numel for each in find_stored_names(tensor) if each in self.source)

    def fingerprint(self) -> str:
        weights = self.adapter.weights
        adapter = content_hash(weights) if is_download(self.adapter.path) else weights.fingerprint()
        return hash_text(f"{self.source.fingerprint()} {adapter} {self.adapter.config}")

    def files(self) -> Sequence[Path]:
        """Return the files of the base and the adapter, without a download, which is known by its content."""
        own = () if is_download(self.adapter.path) else self.adapter.weights.files()
        return [*self.source.files(), *own]

    def notes(self) -> list[str]:
        """Return notes on modules of the adapter that belong to other components."""
        elsewhere = self.adapter.elsewhere if isinstance(self.adapter, LoraFile) else {}
        own = [
            f"{self.adapter.path}: {count} modules of {component} do not belong to {self.source.label} and are left out"
            for component, count in elsewhere.items()
        ]
        return [*super().notes(), *own]


def open_adapter(path: Path, base: Checkpoint) -> AdapterFile | LoraFile:
    """Open the directory of a PEFT adapter, or a LoRA file of a diffusion model, for a base."""
    return LoraFile(path, base) if path.is_file() and not is_adapter(path) else AdapterFile(path)


def find_adapters(checkpoint: Checkpoint) -> Iterator[Adapted]:
    """Yield the adapters of a checkpoint, the outermost first."""
    return (view for view in views(checkpoint) if isinstance(view, Adapted))


def _equal(one: LazyTensor, other: LazyTensor) -> bool:
    a, b = one.read(), other.read()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
