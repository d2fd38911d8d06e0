"""Import functions that a run file or a command line names as `package.module:name`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from merganser.errors import InputError, did_you_mean


def import_function(reference: str, where: str = "") -> Any:
    """Import the function `package.module:name`; the current directory is searched too, as by `python -m`.

    `where` names the source of the reference in errors, e.g. "score".
    """
    said = f"{where} {reference}".strip()
    path, _, name = reference.partition(":")
    if not path or not name:
        raise InputError(f"{said}: expected package.module:function")
    if path.endswith(".py"):
        imported = path.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise InputError(f"{said}: a module is named as in an import: {imported}:{name}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is not None and (path == error.name or path.startswith(f"{error.name}.")):
            raise InputError(f"{said}: no module {path!r} here or installed") from None
        raise InputError(f"{said}: importing {path!r} failed: {error}") from error
    except Exception as error:
        raise InputError(f"{said}: importing {path!r} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{said}: {path!r} has no function {name!r}{did_you_mean(name, public)}")
    return found
