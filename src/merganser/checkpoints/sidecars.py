"""What a checkpoint needs besides its weights: config, generation config, tokenizer, model card.

A plan describes it as data (`Plan.sidecars`):

- `template`: the model whose config and generation config are taken;
- `config`, `generation`: edits `[path, value]`, a value of None removes the key;
- `tokenizer`: `{model, add}`, whose tokenizer files are taken and the tokens to append;
- `chat_template`: its text, if it changes;
- `card`: `{base, models, methods}` as the recipe names them; `recipe`: its text;
- `fingerprint`: that of the plan and its sources, for the card.

The same plan writes the same bytes: no dates, no paths of this machine beyond what the recipe says.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from merganser import __version__
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.json_file import read_object
from merganser.checkpoints.submodules import MODULES, module_weights
from merganser.checkpoints.tokenizer import extended
from merganser.confine import confine
from merganser.errors import CheckpointError, reading

_TOKENIZER_CODE = ("tokenization_*.py",)
_MODEL_CODE = ("configuration_*.py", "modeling_*.py")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    *_TOKENIZER_CODE,
)
_TEMPLATES = "chat_template.*"
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*preprocessor_config.json",
    "processor_config.json",
    *_MODEL_CODE,
    MODULES,
    "sentence_*config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Described(Protocol):
    """Anything that says what its sidecars are, such as a plan."""

    @property
    def sidecars(self) -> Mapping[str, Any]: ...


def prepare_sidecars(plan: Described, sources: Sequence[Checkpoint]) -> Callable[[Path], None]:
    """What writes everything but the weights into a directory; `sources` are the plan's models, opened.

    Files that change are read and rendered now, so that a broken one is found before the work.
    """
    sidecars = plan.sidecars
    template = sources[sidecars.get("template", 0)].directory
    tokenizer = sidecars.get("tokenizer") or {"model": sidecars.get("template", 0)}
    origin = sources[tokenizer["model"]].directory
    chat_template = sidecars.get("chat_template")
    made = {"README.md": model_card(sidecars)}
    copied: dict[str, Path] = {}
    if template is not None:
        copied |= _to_copy(template, _MODEL_FILES)
        for folder, file in module_weights(template).items():
            if folder not in sidecars.get("folders", ()):
                copied[f"{folder}/{file.name}"] = file
        for name, edits in (("config.json", "config"), ("generation_config.json", "generation")):
            if sidecars.get(edits) and (template / name).is_file():
                made[name] = _rendered(edited(read_object(template / name), sidecars[edits]))
    if origin is not None:
        patterns = _TOKENIZER_FILES if chat_template is not None else (*_TOKENIZER_FILES, _TEMPLATES)
        copied |= _to_copy(origin, patterns)
        made |= _changed_tokenizer(origin, tokenizer.get("add") or (), chat_template)

    def write(directory: Path) -> None:
        for name, file in copied.items():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, directory / name)
        for name, text in made.items():
            (directory / name).write_text(text, encoding="utf-8", newline="\n")

    return write


def edited(config: dict[str, Any], edits: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    """A copy with the values at the given paths replaced, or removed where the new value is None."""
    result = copy.deepcopy(config)
    for path, value in edits:
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(path[-1], None)
        else:
            inner[path[-1]] = value
    return result


def _rendered(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def code_files(directory: Path | None) -> list[str]:
    """The files with Python code that are copied along with a model."""
    return [] if directory is None else sorted(_to_copy(directory, (*_MODEL_CODE, *_TOKENIZER_CODE)))


def _to_copy(origin: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """The files of these patterns by their names in a directory; a link to outside would take a stranger along."""
    names = (file.relative_to(origin) for pattern in patterns for file in sorted(origin.glob(pattern)))
    found = {str(name): confine(origin, str(name), str(origin)) for name in names}
    return {name: file for name, file in found.items() if file.is_file()}


def _changed_tokenizer(origin: Path, added: Sequence[Mapping[str, Any]], template: str | None) -> dict[str, str]:
    """The files of a tokenizer that tokens or a chat template are added to.

    The template goes where every version of transformers finds it: into tokenizer_config.json, and to no other place.
    """
    made = {}
    changes: dict[str, Any] = {}
    file = origin / "tokenizer_config.json"
    settings = read_object(file) if (added or template is not None) and file.is_file() else {}
    if added:
        made["tokenizer.json"] = _rendered(extended(read_object(origin / "tokenizer.json"), added))
        if "added_tokens_decoder" in settings:
            if not isinstance(known := settings["added_tokens_decoder"], dict):
                raise CheckpointError(f"{file}: added_tokens_decoder: expected a JSON object")
            records = {str(r["id"]): {k: v for k, v in r.items() if k != "id"} for r in added}
            changes["added_tokens_decoder"] = known | records
    if template is not None:
        changes["chat_template"] = template
    if changes:
        made[file.name] = _rendered(settings | changes)
    return made


def read_chat_template(directory: Path | None) -> str | None:
    """The default chat template in a model directory."""
    if directory is None:
        return None
    if (directory / "chat_template.jinja").is_file():
        confine(directory, "chat_template.jinja", str(directory))
        with reading(directory / "chat_template.jinja", CheckpointError):
            return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return None
    template = read_object(confine(directory, file.name, str(directory))).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [each for each in template if isinstance(each, dict)]
        template = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def model_card(sidecars: Mapping[str, Any]) -> str:
    """A README for the hub: what was merged, how, and the recipe to do it again."""
    card = sidecars.get("card", {})
    models, methods = card.get("models", []), card.get("methods", [])
    named = list(dict.fromkeys([card["base"], *models] if card.get("base") else models))
    hub = [label for label in (re.split("[@+]", name)[0] for name in named) if _HUB_ID.fullmatch(label)]
    header: dict[str, Any] = {"base_model": list(dict.fromkeys(hub))} if hub else {}
    header |= {"library_name": "transformers", "tags": ["merge", "merganser"]}
    front = yaml.safe_dump(header, sort_keys=False, allow_unicode=True).strip()
    lines = ["---", front, "---", "", "# Merged model", ""]
    made = ", ".join(map(_code, methods)) or "a copy"
    lines += [f"Merged with merganser {__version__} by {made}.", ""]
    if card.get("base"):
        lines += [f"Base: {_code(card['base'])}", ""]
    if models:
        lines += ["Models:", "", *(f"- {_code(label)}" for label in models), ""]
    if recipe := sidecars.get("recipe", "").strip():
        fence = "`" * max(3, 1 + _longest_run(recipe))
        lines += ["Recipe:", "", f"{fence}yaml", recipe, fence, ""]
    if fingerprint := sidecars.get("fingerprint"):
        lines += [f"Fingerprint of recipe and sources: `{fingerprint}`", ""]
    return "\n".join(lines)


def _code(text: str) -> str:
    """A text that Markdown shows as it is, in one line: labels come from recipes, which come from anywhere."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    fence = "`" * (1 + _longest_run(line))
    pad = " " if line.startswith("`") or line.endswith("`") or not line.strip() else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
