"""The commands that the page may run, each built from a few checked values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from merganser.errors import InputError, did_you_mean
from merganser.studio.jobs import Command, words
from merganser.studio.roots import Roots


def build_command(roots: Roots, kind: str, values: Mapping[str, Any]) -> Command:
    """Return the command of a kind of job.

    Args:
        roots: The directories that every path must be in.
        kind: One of `KINDS`.
        values: What the page gives for it.

    Raises:
        InputError: If the kind is unknown, a value is missing, or a path leads outside.
    """
    if kind not in KINDS:
        raise InputError(f"unknown kind of job {kind!r}{did_you_mean(kind, KINDS)}")
    try:
        return KINDS[kind](roots, values)
    except KeyError as error:
        raise InputError(f"{kind}: {error} is missing") from None


def _merge(roots: Roots, values: Mapping[str, Any]) -> Command:
    """A recipe's text is given on standard input, from the directory that its relative paths are in."""
    text, out = values["text"], _check_output(roots, values["out"])
    roots.prepare(text, values.get("beside"))
    overwrite = values.get("overwrite")
    if out.exists() and not overwrite:
        raise InputError(f"{roots.show(out)} exists already: choose another name, or replace it")
    cwd = roots.find(values["beside"]) if values.get("beside") else roots.home
    return Command(
        "merge",
        f"Merge into {roots.show(out)}",
        words("merge", "-", str(out), overwrite=overwrite, json=True),
        str(cwd),
        text,
        resumable=True,
        shown={"screen": "checkpoint", "path": roots.show(out)},
    )


def _check(roots: Roots, values: Mapping[str, Any]) -> Command:
    path = roots.locate(values["path"])
    return Command(
        "check",
        f"Check {values['path']}",
        words("inspect", path, check=True, json=True),
        str(roots.home),
        shown=_show(values),
    )


def _interference(roots: Roots, values: Mapping[str, Any]) -> Command:
    experts = _name_expert(roots, values["experts"])
    title = f"Interference of {', '.join(name.partition('=')[0] for name in experts)}"
    layers = 0 if values.get("all") else None  # None leaves it to the command, which measures a few
    arguments = words("inspect", *experts, base=roots.locate(values["base"]), layers=layers, json=True)
    return Command("interference", title, arguments, str(roots.home), shown={"screen": "interference", "path": ""})


def _library(roots: Roots, values: Mapping[str, Any]) -> Command:
    out = _check_output(roots, values["out"])
    experts, base = _name_expert(roots, values["experts"]), roots.locate(values["base"])
    arguments = words("library", "build", str(out), *experts, base=base, budget=values.get("budget"), json=True)
    shown = {"screen": "library", "path": roots.show(out)}
    return Command("library", f"Build {roots.show(out)}", arguments, str(roots.home), shown=shown)


def _evolve(roots: Roots, values: Mapping[str, Any]) -> Command:
    run = roots.find(values["path"])
    study = run.with_suffix(".sqlite")
    return Command(
        "evolve",
        f"Evolve {values['path']}",
        words("evolve", "run", str(run), json=True),
        str(run.parent),
        resumable=True,
        shown={"screen": "evolve", "path": roots.show(study)},
    )


def _export(roots: Roots, values: Mapping[str, Any]) -> Command:
    study, out = roots.find(values["path"]), _check_output(roots, values["out"])
    arguments = words("evolve", "export", str(study), str(out), trial=values.get("trial"), json=True)
    shown = {"screen": "recipe", "path": roots.show(out)}
    return Command("export", f"Export {roots.show(out)}", arguments, str(roots.home), shown=shown)


def _evaluate(roots: Roots, values: Mapping[str, Any]) -> Command:
    path = roots.locate(values["path"])
    parents = [word for parent in values.get("parents", ()) for word in words(parent=roots.locate(parent))]
    arguments = words("evaluate", path, *parents, json=True)
    return Command("evaluate", f"Evaluate {values['path']}", arguments, str(roots.home), shown=_show(values))


KINDS: Mapping[str, Callable[[Roots, Mapping[str, Any]], Command]] = {
    "merge": _merge,
    "check": _check,
    "interference": _interference,
    "library": _library,
    "evolve": _evolve,
    "export": _export,
    "evaluate": _evaluate,
}


def _show(values: Mapping[str, Any]) -> dict[str, str]:
    return {"screen": "checkpoint", "path": values["path"]}


def _check_output(roots: Roots, text: str) -> Path:
    """Return a place to write: inside the directories, not hidden, and not one of the directories themselves."""
    if not text.strip():
        raise InputError("name the place to write to")
    path = roots.find(text.strip())
    if path in roots.directories or any(part.startswith(".") for part in Path(roots.show(path)).parts):
        raise InputError(f"{text}: choose another name for the output")
    return path


def _name_expert(roots: Roots, experts: Mapping[str, str] | Sequence[str]) -> list[str]:
    """Return `NAME=PATH` for every expert; a path without a name is named after its last part."""
    if not experts:
        raise InputError("name the experts")
    pairs = list(experts.items()) if isinstance(experts, Mapping) else [(Path(e).stem or e, e) for e in experts]
    if option := next((name for name, _ in pairs if name.startswith("-")), None):
        raise InputError(f"{option}: the name of an expert must not begin with a dash")
    return [f"{name.replace('=', '-')}={roots.locate(path)}" for name, path in pairs]
