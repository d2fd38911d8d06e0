"""Library messages name Python arguments; the command line names its options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import merganser
from merganser.cli import build
from merganser.cli.commands import find_commands
from merganser.cli.wording import name_options
from merganser.errors import InputError

SOURCE = Path(merganser.__file__).parent
LIBRARY = [path for path in sorted(SOURCE.rglob("*.py")) if SOURCE / "cli" not in path.parents]
#: Variables of style sheets look like options.
STYLE = re.compile(r"var\(--[\w-]*|--[\w-]+:")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
#: Options of another program, which the library looks up for an adapter.
VLLM = {"--enable-lora", "--max-lora-rank"}


def named_options(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (each for each in OPTION.findall(STYLE.sub("", node.value)) if each not in VLLM)


def test_the_search_finds_options_and_no_styles() -> None:
    assert list(named_options('f"{x} (--resume, resume=True)"')) == ["--resume"]
    assert list(named_options('"a { --line: #888; color: var(--line) } <!-- no --> a--b"')) == []


def test_library_code_names_no_option() -> None:
    found = {str(path.relative_to(SOURCE)): names for path in LIBRARY if (names := [*named_options(path.read_text())])}
    assert len(LIBRARY) > 100
    assert not found


@pytest.mark.parametrize(
    ("command", "said", "shown"),
    [
        ("merge", "resume=True continues it, overwrite=True starts", "--resume continues it, --overwrite starts"),
        ("merge", "try one worker (workers=1)", "try one worker (--workers 1)"),
        ("merge", "allow it (allow_nan=True)", "allow it (--allow-nan)"),
        ("merge", "ray='a:1': no answer", "--ray a:1: no answer"),
        ("align", "continue with resume=True", "continue with resume=True"),
        ("demo", "models/seed=3/model: no such file", "models/seed=3/model: no such file"),
        ("merge", "density=0.5: unknown", "density=0.5: unknown"),
    ],
)
def test_arguments_become_options_the_command_has(command: str, said: str, shown: str) -> None:
    assert name_options(said, find_commands(get_command(build()), [command])[-1]) == shown


def test_an_error_of_the_library_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    arguments = ["align", "a=x", "b=y", str(tmp_path / "out"), "--model", "no:such"]
    error = CliRunner().invoke(build(), arguments).exception
    assert isinstance(error, InputError)
    assert "overwrite it (--overwrite)" in str(error)
    assert "=True" not in str(error)
