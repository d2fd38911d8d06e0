"""Choose which of a module's outputs count; the units of others may be reordered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from merganser.errors import InputError, did_you_mean
from merganser.excerpts import list_some

Outputs: TypeAlias = str | Sequence[str] | Callable[[Any], Any]
"""The name of an output ("logits"), a path into a nested one ("text_model_output.pooler_output", "0"), several of
them, or a function from what the module returns to those of its tensors that count."""


def choose(returned: Any, outputs: Outputs | None) -> list[torch.Tensor]:
    """Return the outputs of a module that count.

    Raises:
        InputError: If there is no such output, or it contains no tensor.
    """
    if outputs is None:
        chosen = returned
    elif callable(outputs):
        chosen = _call(outputs, returned)
    else:
        chosen = [_follow(returned, path) for path in ([outputs] if isinstance(outputs, str) else outputs)]
    found = [leaf for leaf in tree_leaves(chosen) if isinstance(leaf, torch.Tensor)]
    if outputs is not None and not found:
        raise InputError(f"outputs={outputs!r} chooses no tensor of what the module returns{_list_outputs(returned)}")
    return found


def names(returned: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a structure with its path."""
    if isinstance(returned, torch.Tensor):
        yield path, returned
    elif isinstance(returned, Mapping):
        for key, value in returned.items():
            yield from names(value, f"{path}.{key}" if path else str(key))
    elif hasattr(returned, "_asdict"):
        yield from names(returned._asdict(), path)
    elif isinstance(returned, list | tuple):
        for place, value in enumerate(returned):
            yield from names(value, f"{path}.{place}" if path else str(place))


def _call(chooser: Callable[[Any], Any], returned: Any) -> Any:
    try:
        return chooser(returned)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InputError(f"the function given as outputs fails: {error!r}{_list_outputs(returned)}") from error


def _follow(returned: Any, path: str) -> Any:
    if not isinstance(path, str):
        raise InputError(f"outputs are names, or a function that chooses them; got {path!r}")
    value = returned
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list | tuple) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        elif not isinstance(value, torch.Tensor) and step.isidentifier() and hasattr(value, step):
            value = getattr(value, step)
        else:
            known = [name for name, _ in names(returned)]
            raise InputError(
                f"the module returns no output {path!r}{_list_outputs(returned)}{did_you_mean(path, known)}"
            )
    return value


def _list_outputs(returned: Any) -> str:
    known = [name for name, _ in names(returned) if name]
    return f"; it returns {list_some(known, 8)}" if known else "; it returns one tensor without a name"
