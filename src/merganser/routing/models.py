"""The common part of adaptive models and baselines: a module over a library, with heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor, nn

from merganser.errors import InputError
from merganser.library.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.composition import Composer
from merganser.routing.heads import HeadLike, Heads, default_features
from merganser.routing.predictions import Prediction

#: From the module's output and its inputs to what the heads read, samples × width.
Features = Callable[[Any, Inputs], Tensor]
T = TypeVar("T", bound="LibraryModel")


class LibraryModel(nn.Module, ABC):
    """A module that holds the base's weights, a library of its experts, and heads that answer.

    `model(batch)` takes a tensor, a tuple of the module's positional arguments or a mapping of its keyword arguments,
    samples first, and returns a `Prediction`. A call runs in evaluation mode and without gradients, whatever `train`
    says, and restores the module on exit.

    The state dict contains the base (`module.…`), heads that are modules (`heads.TASK.…`) and whatever was trained (a
    router, gates). It does not contain the experts: they belong to the library, which is read-only and shared by all
    its models, and their merges are recomputed after the model is moved. A state dict fits any model over the same
    library; one with another base is refused. A deep copy has its own module, heads and router, and the same library.
    """

    module: nn.Module
    heads: Heads | None

    def __init__(
        self,
        module: nn.Module,
        library: Library,
        heads: Mapping[str, HeadLike] | None,
        features: Features | None,
        merge: Mapping[str, Any],
        load_base: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.library = library
        self.features = features or _plain_features
        self.heads = Heads(heads, library.experts) if heads is not None else None
        self.composer = Composer(module, library, merge, load_base)
        self.register_load_state_dict_post_hook(_check_base)  # type: ignore[no-untyped-call]

    @abstractmethod
    def forward(self, batch: Any, *, task: str | None = None) -> Prediction:
        """Answer a batch."""

    def predict(self, batch: Any, task: str | None = None, **options: Any) -> Prediction:
        """Answer a batch; like calling the model, but requires heads.

        Args:
            batch: A tensor, a tuple of the module's positional arguments or a mapping of its keyword arguments.
            task: The task whose head answers; by default the best (task, class) of every sample wins.
            **options: Further arguments of the call.

        Returns:
            The prediction.

        Raises:
            InputError: If there are no heads, or the batch does not fit the module.

        Example:
            >>> model.predict(images).classes
        """
        self.asked(task)
        answer: Prediction = self(batch, task=task, **options)
        return answer

    def asked(self, task: str | None) -> Heads:
        """Return the heads; refuse a task that has none."""
        if self.heads is None:
            raise InputError("this model has no heads: call it as model(batch) and read `logits`")
        self.heads.check(task)
        return self.heads

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        memo[id(self.library)] = self.library
        made.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made


def _plain_features(output: Any, inputs: Inputs) -> Tensor:
    return default_features(output)


def _check_base(model: nn.Module, incompatible: Any) -> None:
    assert isinstance(model, LibraryModel)
    model.composer.verify()
