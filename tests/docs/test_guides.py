"""The guides say what the code does: their Python runs, their commands parse, their recipes and run files load."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from merganser.cli import build

ROOT = Path(__file__).parents[2]
WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
]
GUIDES = {
    (f"{page.parent.name}/" if page.stem == "README" else "") + page.stem: page.read_text("utf-8") for page in WRITTEN
}
GUIDES["README"] = GUIDES.pop(f"{ROOT.name}/README")
#: What a page needs beyond the core.
NEEDS = {"adaptive": "fastapi", "evolution": "pymoo"}


def blocks(guide: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the line it begins at."""
    return fenced(GUIDES[guide], language)


def fenced(text: str, language: str) -> list[tuple[int, str]]:
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def commands(guide: str) -> list[list[str]]:
    """The command lines of a guide's shell blocks, without the program's name."""
    return command_lines("".join(block for _, block in blocks(guide, "sh")))


def command_lines(block: str) -> list[list[str]]:
    lines = block.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words and words[0] == "merganser"]


def mentioned(guide: str) -> list[list[str]]:
    """Commands named inside sentences."""
    text = re.sub(r"^```.*?^```$", "", GUIDES[guide], flags=re.DOTALL | re.MULTILINE)
    return [words.split()[1:] for words in re.findall(r"`(merganser [^`]+)`", text)]


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words name, and the words after it."""
    command: Any = get_command(build())
    while hasattr(command, "commands") and words[:1] != ["--install-completion"]:
        assert words, f"{command.name}: a group of commands, none named"
        assert words[0] in command.commands, f"no command {words[0]!r} in {command.name}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


#: Pages whose Python needs models that a test does not have, or that have a test of their own.
APART = {"surgery", "README", "CONTRIBUTING", "index"}
RUNNING = [guide for guide, text in GUIDES.items() if fenced(text, "python") and guide not in APART]


@pytest.mark.parametrize("guide", RUNNING)
def test_python_runs(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if guide in NEEDS:
        pytest.importorskip(NEEDS[guide])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a program started there
    namespace: dict[str, Any] = {"__name__": "guide"}
    for line, block in blocks(guide, "python"):
        exec(compile("\n" * line + block, f"docs/{guide}.md", "exec"), namespace)


def test_a_method_in_a_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of CONTRIBUTING.md, as docs/merging.md says it may be used."""
    import merganser as mg
    from merganser.methods import registry

    registry.registry()  # all of them, before the copy that forgets the new one
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.syspath_prepend(tmp_path)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tmp_path / "guide_median.py").write_text(fenced(text, "python")[0][1], encoding="utf-8")
    importlib.import_module("guide_median")
    models = [{"a": torch.tensor([0.0, value])} for value in (1.0, 2.0, 9.0)]
    assert mg.merge(models, "median")["a"].tolist() == [0.0, 2.0]
    assert mg.merge(models, "median", shrink=1.0)["a"].tolist() == [0.0, 4.0]


def test_the_start_page_leads_to_a_merge_that_transformers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yml").write_text(blocks("index", "yaml")[0][1], encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "guide"}
    found = [(line, kind, block) for kind in ("python", "sh") for line, block in blocks("index", kind)]
    for _, language, block in sorted(found):
        if language == "python":
            exec(compile(block, "docs/index.md", "exec"), namespace)
            continue
        for words in command_lines(block):
            done = CliRunner().invoke(build(), words)
            assert done.exit_code == 0, done.output
    assert namespace["model"].dtype == torch.bfloat16
    assert namespace["merged"].keys() == namespace["model"].state_dict().keys()


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_parse(guide: str) -> None:
    for words in commands(guide):
        command, rest = resolve(words)
        command.make_context(" ".join(words), rest)  # raises on unknown options and missing arguments; runs nothing


@pytest.mark.parametrize("guide", GUIDES)
def test_mentioned_commands_have_their_options(guide: str) -> None:
    for words in mentioned(guide):
        command, rest = resolve(words)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in rest if word.startswith("-")} <= known, words


@pytest.mark.parametrize("guide", GUIDES)
def test_recipes_and_run_files_load(guide: str) -> None:
    from merganser import recipes
    from merganser.evolve.runfile import RunFile
    from merganser.evolve.schema import from_document
    from merganser.surgery.moe_recipes import load_moe

    for _, block in blocks(guide, "yaml"):
        document = yaml.safe_load(block)
        if "space" in document:
            from_document(RunFile, document)
        elif "experts" in document:
            load_moe(document)
        else:
            recipes.load(document)
