"""Rewrite error messages for the command line: library messages name Python arguments, a shell has options."""

from __future__ import annotations

import re
from typing import Any

#: `name=value` as library messages write an argument: resume=True, workers=1, ray='auto'.
_ARGUMENT = re.compile(r"(?<![^\s(])([a-z_]+)=(\w+|'[^']*')(?=[\s,;:.)]|$)")


def name_options(message: str, command: Any) -> str:
    """Write the Python arguments in a message as options of the running command, where it has them.

    `resume=True` becomes `--resume`, `workers=1` becomes `--workers 1`; arguments without an option stay unchanged.
    """
    known = {option for parameter in command.params for option in parameter.opts}

    def as_option(found: re.Match[str]) -> str:
        option, value = f"--{found[1].replace('_', '-')}", found[2].strip("'")
        if option not in known:
            return found[0]
        return option if value == "True" else f"{option} {value}"

    return _ARGUMENT.sub(as_option, message)
