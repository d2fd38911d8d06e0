"""Read pickles as inert records: nothing that a pickle names is imported or called."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

#: Types of Python that pickles may create.
_PLAIN: dict[str, type] = {"collections.OrderedDict": dict, "builtins.set": set, "builtins.dict": dict}
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")


class InertRecord:
    """A placeholder for an object of a pickle.

    Attributes:
        path: The path of its type or function, such as "torch.Size".
        args: The arguments of the call.
        state: The state that would have been set.
        items: The items that would have been added, as a list or mapping.
    """

    path = ""

    def __new__(cls, *args: Any, **_: Any) -> InertRecord:
        record = super().__new__(cls)
        record.args, record.state, record.items = args, {}, {}
        return record

    args: tuple[Any, ...]
    state: dict[str, Any]
    items: dict[Any, Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else {"state": state}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.items[len(self.items)] = value


def load_inert(
    raw: bytes, accepts: Callable[[str], bool], persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, frozenset[str]]:
    """Return the content of a pickle, with records in place of objects.

    Args:
        raw: The pickle.
        accepts: Whether a type or function of this path may be recorded.
        persistent: Returns placeholders for objects that are stored elsewhere.

    Returns:
        The content, and the paths of everything that was recorded.

    Raises:
        ValueError: If the pickle is damaged, or names a type or function that is not accepted.

    Example:
        >>> load_inert(pickle.dumps(Path("x")), lambda path: path.startswith("pathlib."))[0].args
        ('x',)
    """
    try:
        for opcode, argument, _ in pickletools.genops(raw):  # the unpickler allocates whatever size it is told
            if opcode.name in _MEMO and int(argument or 0) > len(raw):
                raise ValueError(f"it declares {argument} objects but has only {len(raw)} bytes")
        unpickler = _Unpickler(raw, accepts, persistent)
        return unpickler.load(), frozenset(unpickler.seen)
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"not a readable pickle: {error}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes, accepts: Callable[[str], bool], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(raw))
        self.seen: dict[str, type] = {}
        self._accepts = accepts
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path in _PLAIN:
            return _PLAIN[path]
        if not self._accepts(path):
            raise ValueError(f"it asks for {path[:100]}, which is not allowed here")
        if path not in self.seen:
            self.seen[path] = type("InertRecord", (InertRecord,), {"path": path})
        return self.seen[path]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise ValueError("it refers to an external object")
        return self._persistent(pid)


def read_sizes(value: Any) -> tuple[int, ...]:
    """Return the whole numbers of a tuple, or of the record of a shape.

    Raises:
        ValueError: If it is anything else.
    """
    inner = value.args[0] if isinstance(value, InertRecord) and value.path == "torch.Size" and value.args else value
    found = tuple(inner) if isinstance(inner, (tuple, list)) else (None,)
    if not all(type(each) is int and each >= 0 for each in found):
        raise ValueError("it has a shape that is not whole numbers")
    return found
