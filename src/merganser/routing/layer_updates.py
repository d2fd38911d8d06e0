"""Add updates to the outputs of layers, and detect layers whose weight is read without a call, which hooks miss."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from merganser.modules.activations import Layer, input_of

#: From a layer's name and its input to the update of its output.
Update = Callable[[str, Tensor], Tensor]


@contextmanager
def add_updates(layers: Mapping[str, Layer], update: Update) -> Iterator[set[str]]:
    """Compute y = W x + b + update(name, x) in every call of the layers.

    Yields the layers whose weight was read since their last call. After a forward pass there should be none: if a
    weight is read without calling its layer (`F.linear(x, layer.weight)`), an update beside the layer has no effect. A
    layer that a pass does not use is not included.
    """
    read: set[str] = set()

    def called(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], Tensor]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            read.discard(name)
            return output + update(name, input_of(args, kwargs))

        return hook

    with ExitStack() as undo:
        for name, layer in layers.items():
            undo.callback(layer.register_forward_hook(called(name), with_kwargs=True).remove)
            undo.callback(setattr, layer, "_parameters", layer._parameters)
            layer._parameters = _Watched(layer._parameters, name, read)
        yield read


class _Watched(dict[str, Any]):
    """The parameters of a layer; reading its weight, also by the layer's own call, adds the layer to `read`."""

    def __init__(self, parameters: Mapping[str, Any], layer: str, read: set[str]) -> None:
        super().__init__(parameters)
        self._layer, self._read = layer, read

    def __getitem__(self, key: str) -> Any:
        if key == "weight":
            self._read.add(self._layer)
        return super().__getitem__(key)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._read.add(self._layer)
        return super().items()
