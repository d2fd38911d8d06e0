"""Old spellings of commands and options. They work for one more version and print the new spelling."""

from __future__ import annotations

from collections.abc import Sequence

#: Old name of a command or group -> new name.
COMMANDS = {"experts": "library"}

#: By command, old option -> new option; "" where the value is now the last argument, OUT.
OPTIONS: dict[str, dict[str, str]] = {
    "align": {"--out": "", "--method": "--matching"},
    "demo": {"--out": ""},
    "evaluate": {"--parents": "--parent", "--tasks": "--task"},
    "merge-lora": {"--out": ""},
    "serve": {"--score": "--head-score"},
    "sweep": {"--tasks": "--task", "--budgets": "--rung"},
}
#: Old options whose value was a comma-separated list and which are now repeated.
LISTS = ("--budgets",)


def rewrite(words: Sequence[str]) -> list[str]:
    """Return a command line, without the program's name, in the current spelling."""
    if not words:
        return []
    name = COMMANDS.get(words[0], words[0])
    renamed = OPTIONS.get(name, {})
    written, last = [name], list[str]()
    rest = iter(words[1:])
    for word in rest:
        if word == "--":
            return [*written, word, *rest, *last]
        old, equals, value = word.partition("=")
        if old not in renamed:
            written.append(word)
            continue
        given = value if equals else next(rest, None)
        if given is None:  # the value is missing; the parser reports that
            written.append(renamed[old] or old)
        elif not renamed[old]:
            last.append(given)
        else:
            values = given.split(",") if old in LISTS else [given]
            written += [part for each in values for part in (renamed[old], each)]
    return [*written, *last]
