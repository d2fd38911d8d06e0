"""Pages of the site that are made from the code: methods, commands, the Python reference, and copies of what lies
outside of `docs/`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mkdocs_gen_files
from typer.main import get_command

from merganser.cli import build
from merganser.methods.catalogue import MethodRow, catalogue

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "merganser",
    "align",
    "analysis",
    "evaluate",
    "evolve",
    "federated",
    "interference",
    "library",
    "origin",
    "report",
    "routing",
    "surgery",
    "tuning",
)
COPIES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security_policy.md"}


def write(path: str, text: str) -> None:
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)


def methods() -> str:
    """One section a method: its formula, what it needs, its parameters."""
    rows = catalogue()
    index = [f"| [`{row.name}`](#{row.name}) | {row.summary} |" for row in rows]
    parts = ["# Methods", f"{len(rows)} merging methods.", "| method | |\n|---|---|\n" + "\n".join(index)]
    return "\n\n".join([*parts, *map(method, rows)]) + "\n"


def method(row: MethodRow) -> str:
    also = f" Also called {', '.join(f'`{name}`' for name in row.also)}." if row.also else ""
    facts = f"Models: {row.models}. Base: {row.base}. Reach: {row.reach}.{also}"
    parts = [f"## {row.name}", row.description, facts]
    if row.parameters:
        table = ["| parameter | default | values | meaning |", "|---|---|---|---|"]
        for p in row.parameters:
            each = " (one for each model)" if p.per_model else ""
            bounds = p.bounds.replace("|", "or")
            table.append(f"| `{p.name}` | {p.default} | {bounds} | {p.help}{each} |")
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def commands() -> str:
    """Every command with its arguments and options."""
    parts = ["# Commands"]
    for name, command in walk("merganser", get_command(build())):
        if hasattr(command, "commands") and name == "merganser":
            continue
        parts += [f"## {name}", inspect.cleandoc(command.help or "")]
        rows = [
            row for parameter in command.params if not getattr(parameter, "hidden", False) for row in option(parameter)
        ]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for key, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            yield from walk(f"{name} {key}", inner)


def option(parameter: Any) -> Iterator[str]:
    if parameter.param_type_name == "argument":
        name = parameter.make_metavar() if not parameter.metavar else parameter.metavar
    else:
        name = ", ".join((*parameter.opts, *parameter.secondary_opts))
    if name != "--help":
        yield f"| `{name}` | {' '.join((getattr(parameter, 'help', None) or '').split()).replace('|', '/')} |"


def reference(package: str) -> str:
    """The public names of a package, each with its documentation."""
    name = "merganser" if package == "merganser" else f"merganser.{package}"
    module = importlib.import_module(name)
    parts = [f"# {name}", inspect.cleandoc(module.__doc__ or "")]
    for public in module.__all__:
        found = getattr(module, public)
        if inspect.isclass(found) or inspect.isfunction(found):
            parts.append(f"::: {found.__module__}.{found.__qualname__}")
    return "\n\n".join(parts) + "\n"


write("reference/methods.md", methods())
write("reference/commands.md", commands())
for package in PACKAGES:
    write(f"reference/{package}.md", reference(package))
for source, page in COPIES.items():
    write(page, (ROOT / source).read_text(encoding="utf-8"))
for result in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
    write(f"results/{result.name}", result.read_text(encoding="utf-8"))
