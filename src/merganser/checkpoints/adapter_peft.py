"""PEFT's own merge of an adapter, layer by layer: for kinds of adapters not implemented here, and as proof.

PEFT gets a model whose parameters take no memory (one zero, expanded). Each layer that the adapter changes is copied
when needed, with the base's weights in place of the zeros, merged by PEFT, and dropped.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.adapter_file import PREFIX, AdapterFile
from merganser.checkpoints.base import Rows, select_rows
from merganser.checkpoints.lazy_tensors import LazyTensor
from merganser.checkpoints.reads import note_read
from merganser.errors import CheckpointError, first_line, require
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class PeftLayers:
    """The layers that an adapter changes, merged by PEFT.

    Attributes:
        layers: Paths of changed layers -> the names of their parameters.
        saved: Parameters that the adapter replaces -> their values.
        trained: The names in `saved` that were trained, not only saved.
    """

    def __init__(self, adapter: AdapterFile, model: nn.Module) -> None:
        """Attach an adapter to a model.

        Args:
            adapter: The adapter.
            model: The base's model on the meta device; it is changed.

        Raises:
            CheckpointError: If PEFT cannot attach or merge this adapter.
        """
        peft = require("peft", "hf")
        self.adapter = adapter
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        _fill(model)
        with _refusing(adapter, "cannot be attached to its base"):
            config = peft.PeftConfig.from_pretrained(str(adapter.path))
            config.inference_mode = True
            if config.is_prompt_learning or config.peft_type in ("ADAPTION_PROMPT", "XLORA", "POLY"):
                raise ValueError(f"a {config.peft_type.value} adapter changes the inputs of a model, not its weights")
            self._model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
            weights = {name: adapter.weights.read(name).float() for name in adapter.weights.names()}
            result = peft.set_peft_model_state_dict(self._model, weights, low_cpu_mem_usage=True)
        if result.unexpected_keys:
            raise CheckpointError(
                f"{adapter.path}: has {result.unexpected_keys[0]!r}, which matches neither its base nor its config"
            )
        self._tuner_layer = require("peft.tuners.tuners_utils", "hf").BaseTunerLayer
        self.layers: dict[str, tuple[str, ...]] = {}
        self.saved: dict[str, Tensor] = {}
        self.trained: set[str] = set()
        self._modules: dict[str, nn.Module] = {}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        self._lock = threading.RLock()
        self._index(names)
        lacking = [key for key in result.missing_keys if self._is_adapters(key)]
        if lacking:
            raise CheckpointError(f"{adapter.path}: lacks {lacking[0]!r}, which its config requires")
        for path in {type(each): path for path, each in self._modules.items()}.values():
            self._rehearse(path)

    def _index(self, names: set[str]) -> None:
        inside: list[str] = []
        for path, module in self._model.named_modules():
            if any(path.startswith(f"{each}.") for each in inside):
                continue
            bare = path.removeprefix(PREFIX).removesuffix(".token_adapter")
            if isinstance(module, self._tuner_layer):
                inside.append(path)
                own = [name for name, _ in module.get_base_layer().named_parameters()]
                self._modules[bare] = module
                self.layers[bare] = tuple(each for name in own if (each := f"{bare}.{name}") in names)
            elif hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                inside.append(path)
                for kept in module.modules_to_save.values():
                    values = {f"{bare}.{name}": each.detach() for name, each in kept.named_parameters()}
                    self.saved |= values
                    self.trained |= values.keys()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            bare = name.removeprefix(PREFIX).replace(".original_module.", ".").replace(".base_layer.", ".")
            bare = bare.replace(".token_adapter.", ".")
            if bare in names and not _is_empty(parameter) and bare not in self.saved:
                self.saved[bare] = parameter.detach()

    def _is_adapters(self, key: str) -> bool:
        """Return whether a tensor that was not loaded belongs to the adapter, not to the base."""
        names = {name for layer in self._modules.values() for name in layer.adapter_layer_names}  # type: ignore[union-attr]
        tokens = "trainable_tokens_delta"  # a tied head shares them with its embedding
        if tokens in key and any(tokens in name for name in self.adapter.weights.names()):
            return False
        return any(f".{name}." in f"{key}." for name in names)

    def _rehearse(self, path: str) -> None:
        """Merge a layer of zeros, to find layers that PEFT cannot merge before any work."""
        shapes = dict(self._modules[path].get_base_layer().named_parameters())  # type: ignore[operator]
        self._merge(path, lambda name: torch.zeros(shapes[name.removeprefix(f"{path}.")].shape))

    def kind(self, path: str) -> str:
        """Return the class name of one of `layers`."""
        return type(self._modules[path].get_base_layer()).__name__  # type: ignore[operator]

    def merge(self, path: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the parameters of one layer with the adapter, in float32; those of the last layer are kept.

        Args:
            path: The layer, one of `layers`.
            read: Reads a parameter of the base by its name.
        """
        with self._lock:
            if self._last is None or self._last[0] != path:
                self._last = None  # free it before the next
                self._last = (path, self._merge(path, read))
            return self._last[1]

    def _merge(self, path: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        layer: Any = self._modules[path]
        memo: dict[int, Any] = {}
        for name, parameter in layer.get_base_layer().named_parameters():
            full = f"{path}.{name}"
            if full in self.layers[path] and id(parameter) not in memo:
                value = parameter.detach() if not _is_empty(parameter) else read(full)
                memo[id(parameter)] = torch.nn.Parameter(value.float().clone(), requires_grad=False)
        for shared in self._shared(layer):
            memo[id(shared)] = shared
        merged: Any = copy.deepcopy(layer, memo)
        with _refusing(self.adapter, f"cannot be merged into {path!r}"), torch.no_grad():
            chain = [merged]
            while isinstance(inner := getattr(chain[-1], "base_layer", None), self._tuner_layer):
                chain.append(inner)
            for each in reversed(chain):
                each.merge(safe_merge=False)
                if not each.merged:
                    raise ValueError("PEFT did not merge it")
        found = dict(merged.get_base_layer().named_parameters())
        return {full: found[full.removeprefix(f"{path}.")].detach() for full in self.layers[path]}

    @staticmethod
    def _shared(layer: Any) -> Iterator[Any]:
        """Yield tensors that all layers share, such as VeRA's projections, which must not be copied with each."""
        for name in getattr(layer, "other_param_names", ()):
            shared = getattr(layer, name, None)
            if isinstance(shared, torch.nn.Module):
                yield from shared.buffers()


@dataclass(frozen=True, eq=False)
class PeftTensor(LazyTensor):
    """A parameter of a layer as PEFT merges it."""

    layers: PeftLayers
    path: str
    name: str
    base: Mapping[str, LazyTensor]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.base[self.name].shape

    def parts(self) -> Sequence[LazyTensor]:
        return [self.base[name] for name in self.layers.layers[self.path]]

    def read(self, rows: Rows | None = None) -> Tensor:
        weights = self.layers.adapter.weights
        for name in weights.names():  # PEFT reads all of them
            note_read(weights, name)
        return select_rows(self.layers.merge(self.path, lambda name: self.base[name].read())[self.name], rows)


def _fill(model: nn.Module) -> None:
    """Give parameters on the meta device a value that takes no memory; tied parameters stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                if id(parameter) not in made:
                    zero = torch.zeros(()).expand(parameter.shape)
                    made[id(parameter)] = torch.nn.Parameter(zero, requires_grad=False)
                module._parameters[name] = made[id(parameter)]


def _is_empty(parameter: Tensor) -> bool:
    return parameter.device.type == "meta" or (parameter.numel() > 1 and not any(parameter.stride()))


@contextmanager
def _refusing(adapter: AdapterFile, what: str) -> Iterator[None]:
    """Turn any error of PEFT into one that names the adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{adapter.path}: {adapter.needs_peft or 'it'} and {what}: {first_line(error)}"
            ) from None
