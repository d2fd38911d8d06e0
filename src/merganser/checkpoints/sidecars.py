"""What a checkpoint needs besides its weights: config, generation config, tokenizer, model card.

A plan describes it as data (`Plan.sidecars`):

- `template`: the model whose config and generation config are taken;
- `config`, `generation`: edits `[path, value]`, a value of None removes the key;
- `tokenizer`: `{model, add}`, whose tokenizer files are taken and the tokens to append;
- `chat_template`: its text, if it changes;
- `card`: `{base, models, methods}` as the recipe names them; `recipe`: its text.

The same plan writes the same bytes: no dates, no paths of this machine beyond what the recipe says.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from merganser import __version__
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.tokenizer import extended

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.*",
    "tokenization_*.py",
)
_MODEL_FILES = (
    "*preprocessor_config.json",
    "processor_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "modules.json",
    "sentence_*config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Described(Protocol):
    """Anything that says what its sidecars are, such as a plan."""

    @property
    def sidecars(self) -> Mapping[str, Any]: ...


def write_sidecars(plan: Described, sources: Sequence[Checkpoint], directory: Path) -> None:
    """Write everything but the weights into `directory`; `sources` are the plan's models, opened."""
    sidecars = plan.sidecars
    template = sources[sidecars.get("template", 0)].directory
    if template is not None:
        _write_edited(template / "config.json", directory, sidecars.get("config", ()))
        _write_edited(template / "generation_config.json", directory, sidecars.get("generation", ()))
        _copy(template, directory, _MODEL_FILES)
    tokenizer = sidecars.get("tokenizer") or {"model": sidecars.get("template", 0)}
    origin = sources[tokenizer["model"]].directory
    if origin is not None:
        _copy(origin, directory, _TOKENIZER_FILES)
        _append_tokens(directory, tokenizer.get("add") or ())
        if sidecars.get("chat_template") is not None:
            _set_chat_template(directory, sidecars["chat_template"])
    (directory / "README.md").write_text(model_card(sidecars), encoding="utf-8", newline="\n")


def edited(config: dict[str, Any], edits: Sequence[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    """A copy with the values at the given paths replaced, or removed where the new value is None."""
    result: dict[str, Any] = json.loads(json.dumps(config))
    for path, value in edits:
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        if value is None:
            inner.pop(path[-1], None)
        else:
            inner[path[-1]] = value
    return result


def _write_edited(file: Path, directory: Path, edits: Sequence[tuple[Sequence[str], Any]]) -> None:
    if not file.is_file():
        return
    if not edits:
        shutil.copyfile(file, directory / file.name)
        return
    _write_json(directory / file.name, edited(json.loads(file.read_text(encoding="utf-8")), edits))


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _copy(origin: Path, directory: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for file in sorted(origin.glob(pattern)):
            if file.is_file():
                target = directory / file.relative_to(origin)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _append_tokens(directory: Path, added: Sequence[Mapping[str, Any]]) -> None:
    if not added:
        return
    file = directory / "tokenizer.json"
    _write_json(file, extended(json.loads(file.read_text(encoding="utf-8")), added))
    settings = directory / "tokenizer_config.json"
    if settings.is_file():
        data = json.loads(settings.read_text(encoding="utf-8"))
        if "added_tokens_decoder" in data:
            known = {str(r["id"]): {k: v for k, v in r.items() if k != "id"} for r in added}
            data["added_tokens_decoder"] |= known
            _write_json(settings, data)


def _set_chat_template(directory: Path, template: str) -> None:
    """Where every version of transformers finds it: in tokenizer_config.json, and in no other place."""
    for file in directory.glob("chat_template.*"):
        file.unlink()
    settings = directory / "tokenizer_config.json"
    data = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    _write_json(settings, data | {"chat_template": template})


def read_chat_template(directory: Path | None) -> str | None:
    """The default chat template in a model directory."""
    if directory is None:
        return None
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return None
    template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
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
    made = ", ".join(f"`{method}`" for method in methods) or "a copy"
    lines += [f"Merged with merganser {__version__} by {made}.", ""]
    if card.get("base"):
        lines += [f"Base: `{card['base']}`", ""]
    if models:
        lines += ["Models:", "", *(f"- `{label}`" for label in models), ""]
    if recipe := sidecars.get("recipe", "").strip():
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", recipe)), default=0))
        lines += ["Recipe:", "", f"{fence}yaml", recipe, fence, ""]
    return "\n".join(lines)
