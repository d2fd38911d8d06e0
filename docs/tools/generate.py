"""Pages of the site that are made from the code: methods, commands, the Python reference, and copies of what lies
outside of `docs/`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mkdocs_gen_files
import yaml
from typer.main import get_command

from merganser.cli import build
from merganser.evolve.runfile import RunFile
from merganser.evolve.schema import json_schema
from merganser.methods.catalogue import MethodRow, catalogue
from merganser.recipes.json_schema import recipe_schema

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "merganser",
    "align",
    "analysis",
    "checkpoints",
    "errors",
    "evaluate",
    "evolve",
    "federated",
    "interference",
    "library",
    "origin",
    "recipes",
    "report",
    "routing",
    "surgery",
    "tuning",
)
#: Records of a run file, as their tables are called.
SECTIONS = {
    "ModelSettings": "model",
    "Objective": "objective",
    "Search": "search",
    "SearchParameter": "parameter",
    "StudyTask": "task",
}
WHEN = yaml.safe_load((ROOT / "docs/tools/when_to_use.yml").read_text(encoding="utf-8"))
COPIES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security_policy.md"}


def write(path: str, text: str) -> None:
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)


def methods() -> str:
    """Return one section per method: when to use it, its formula, what it needs, its parameters."""
    rows = catalogue()
    index = [f"| [`{row.name}`](#{row.name}) | {row.summary} |" for row in rows]
    intro = (
        f"{len(rows)} merging methods, each with its formula, paper, parameters and when to use it. "
        "[Which method?](../choosing.md) helps you choose."
    )
    parts = ["# Methods", intro, "| method | |\n|---|---|\n" + "\n".join(index)]
    return "\n\n".join([*parts, *map(method, rows)]) + "\n"


def method(row: MethodRow) -> str:
    also = f" Also called {', '.join(f'`{name}`' for name in row.also)}." if row.also else ""
    needs = f" Statistics: {', '.join(f'`{name}`' for name in row.statistics)}." if row.statistics else ""
    facts = f"Models: {row.models}. Base: {row.base}.{needs} Cost: {row.cost}.{also}"
    parts = [f"## {row.name}", f"**When to use it.** {WHEN[row.name]}", row.description, facts]
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
        summary, _, details = inspect.cleandoc(command.help or "").partition("\n\n")
        parts += [f"## {name}", summary, f"```text\n{usage(name, command)}\n```", *([details] if details else [])]
        rows = [
            row for parameter in command.params if not getattr(parameter, "hidden", False) for row in option(parameter)
        ]
        if rows:
            parts.append("\n".join(["| | | default |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def usage(name: str, command: Any) -> str:
    """Return the line that a user types, without its options."""
    arguments = [
        (each.metavar or each.name.upper()).rstrip(".…") + ("…" if each.nargs == -1 else "")
        for each in command.params
        if each.param_type_name == "argument"
    ]
    return " ".join([name, *arguments, *(["COMMAND"] if hasattr(command, "commands") else []), "[OPTIONS]"])


def files() -> str:
    """Return the keys of recipes and run files as tables."""
    recipe, run = recipe_schema(), json_schema(RunFile)
    shared = set(recipe["$defs"]["parameters"]["properties"])
    parts = ["# Recipes and run files", "Every key of the two files that you write. [Recipes](../recipes.md) and"]
    parts[-1] += " [Evolution](../evolution.md) explain them; `merganser schema` prints the JSON Schemas."
    tables = [("Recipe", recipe)]
    sections = ("entry", "slice", "module", "override", "output", "tokenizer", "token", "token_source", "conventions")
    tables += [(f"Recipe: {name}", recipe["$defs"][name]) for name in sections]
    tables += [("Run file", run)]
    tables += [(f"Run file: {SECTIONS[name]}", each) for name, each in run["$defs"].items()]
    for title, schema in tables:
        rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
        required = schema.get("required", ())
        for key, value in schema["properties"].items():
            if title in ("Recipe: entry", "Recipe: override") and key in shared:
                continue
            default = "required" if key in required else written(value.get("default"))
            meaning = " ".join(value.get("description", "").split()).replace("|", "or")
            rows.append(f"| `{key}` | {values(value)} | {default} | {meaning} |")
        parts += [f"## {title}", "\n".join(rows)]
        if title in ("Recipe: entry", "Recipe: override"):
            parts.append("Also the parameters of the [method](methods.md).")
    return "\n\n".join(parts) + "\n"


def written(default: Any) -> str:
    """Return a default as YAML has it."""
    return "" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def values(schema: dict[str, Any]) -> str:
    """Return the values that a schema allows, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        known = {
            "reference": "model",
            "recipe": "[recipe](#recipe)",
            "parameters": "[parameters](methods.md) of the method",
        }
        shown = SECTIONS.get(name, name)
        return known.get(name, f"[{shown}](#{'run-file' if name in SECTIONS else 'recipe'}-{shown})")
    if "enum" in schema:
        return (
            "[method](methods.md)" if len(schema["enum"]) > 20 else ", ".join(f"`{value}`" for value in schema["enum"])
        )
    if "anyOf" in schema:
        found = [values(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return "; or ".join(dict.fromkeys(found))
    if isinstance(schema.get("type"), list):
        return " or ".join(values({**schema, "type": kind}) for kind in schema["type"] if kind != "null")
    if schema.get("type") == "array":
        return f"list of {values(schema.get('items', {}))}"
    inner = schema.get("additionalProperties")
    if schema.get("type") == "object":
        return f"mapping from names to {values(inner)}" if isinstance(inner, dict) and inner else "mapping"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    return words.get(schema.get("type", ""), "any value")


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
        meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "/")
        yield f"| `{name}` | {meaning} | {shown(parameter)} |"


def shown(parameter: Any) -> str:
    """Return the default of an option, unless it is none or off."""
    if parameter.required:
        return "required"
    default = parameter.default
    if callable(default) or default is None or default is False or default in ((), [], ""):
        return ""
    if isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    return f"`{getattr(default, 'value', default)}`"


def reference(package: str, shown: set[str]) -> str:
    """The public names of a package and of its public modules, each with its documentation, unless it was shown."""
    name = "merganser" if package == "merganser" else f"merganser.{package}"
    module = importlib.import_module(name)
    parts = [f"# {name}", inspect.cleandoc(module.__doc__ or ""), *documented(module, shown)]
    for public in getattr(module, "__all__", ()) if package != "merganser" else ():
        inner = getattr(module, public)
        if inspect.ismodule(inner) and (own := documented(inner, shown, level=3)):
            parts += [f"## {name}.{public}", inspect.cleandoc(inner.__doc__ or ""), *own]
    return "\n\n".join(parts) + "\n"


def documented(module: ModuleType, shown: set[str], level: int = 2) -> list[str]:
    """The functions, classes and errors that a module exports, or else defines, below headings of a level."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = [getattr(module, name) for name in names]
    own = [each for each in found if inspect.isclass(each) or inspect.isfunction(each)]
    if not hasattr(module, "__all__"):
        own = [each for each in own if each.__module__ == module.__name__]
    own.sort(key=lambda each: inspect.isclass(each) + (inspect.isclass(each) and issubclass(each, Exception)))
    places = [place for each in own if (place := f"{each.__module__}.{each.__qualname__}") not in shown]
    shown.update(places)
    return [f"::: {place}\n    options:\n      heading_level: {level}" for place in places]


write("reference/methods.md", methods())
write("reference/commands.md", commands())
write("reference/files.md", files())
listed: set[str] = set()
for package in PACKAGES:
    write(f"reference/{package}.md", reference(package, listed))
for source, page in COPIES.items():
    write(page, (ROOT / source).read_text(encoding="utf-8"))
for result in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
    write(f"results/{result.name}", result.read_text(encoding="utf-8"))
