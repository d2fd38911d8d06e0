"""The command line is one language: what holds for every command, found by walking the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from merganser.cli import COMMANDS, build, renamed
from merganser.cli.commands import find_commands


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
    else:
        for name, each in inner.items():
            yield from leaves(each, (*path, name))


TREE = get_command(build())
LEAVES = dict(leaves(TREE))
#: Words that begin a noun phrase or a clause, not an order.
NO_VERBS = {"The", "A", "An", "One", "What", "How", "All", "Every", "Each", "This", "Whether", "With", "Without"}


def options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def arguments(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "argument"]


def type_of(option: Any) -> str:
    """The type of an option's values; versions of typer keep it in two places."""
    found = getattr(option, "type_descriptor", None)
    return found.annotation.__name__ if found is not None else option.type.name


def test_the_walk_reaches_commands_and_groups() -> None:
    assert {name.split()[0] for name in LEAVES} == set(COMMANDS)
    assert {"plan", "merge", "library build", "library merge", "evolve run"} <= set(LEAVES)


@pytest.mark.parametrize("group", ["", "library", "evolve"])
def test_summaries_fit_into_the_list_of_commands(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = find_commands(TREE, [group] if group else [])[-1]
    listed = command.get_help(command.make_context("merganser", [], resilient_parsing=True)).partition("Commands:")[2]
    assert listed
    assert "..." not in listed


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_prints_json(name: str) -> None:
    assert "--json" in {option for each in options(LEAVES[name]) for option in each.opts}


@pytest.mark.parametrize("name", LEAVES)
def test_help_is_a_sentence_that_starts_with_a_verb(name: str) -> None:
    summary = re.split(r"\n\s*\n", LEAVES[name].help)[0].strip()
    first = summary.split()[0].rstrip(",:;")
    assert summary.endswith("."), summary
    assert re.fullmatch(r"[A-Z][a-z]+(?<!ing)(?<!s)", first), summary
    assert first not in NO_VERBS, summary


@pytest.mark.parametrize("name", LEAVES)
def test_every_parameter_is_documented(name: str) -> None:
    for each in LEAVES[name].params:
        if each.name != "help":
            assert re.fullmatch(r"[A-Z].*[.…]", each.help or ""), f"{name}: {each.name}: {each.help}"


@pytest.mark.parametrize("name", LEAVES)
def test_what_is_made_stands_last_and_has_no_option(name: str) -> None:
    command = LEAVES[name]
    assert not {"--out", "--output-dir", "-o"} & {option for each in options(command) for option in each.opts}
    places = [each.metavar for each in arguments(command)]
    assert "OUT" not in places[:-1]
    made = {each.name for each in command.params}
    assert "out" not in made or places[-1] == "OUT"


@pytest.mark.parametrize("name", LEAVES)
def test_options_that_repeat_are_singular(name: str) -> None:
    for each in options(LEAVES[name]):
        if each.multiple:
            assert not each.opts[0].endswith("s"), f"{name} {each.opts[0]}"


def test_an_option_is_the_same_thing_in_every_command() -> None:
    meanings: dict[str, dict[tuple[Any, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command in LEAVES.items():
        for each in options(command):
            kind = (type_of(each), each.metavar, each.multiple, each.is_flag)
            for option in (*each.opts, *each.secondary_opts):
                meanings[option][kind].append(name)
    mixed = {option: dict(kinds) for option, kinds in meanings.items() if len(kinds) > 1}
    assert not mixed


@pytest.mark.parametrize("command", renamed.OPTIONS)
def test_old_options_lead_to_options_of_today(command: str) -> None:
    found = find_commands(TREE, command.split())[-1]
    known = {option for each in options(found) for option in each.opts}
    for old, new in renamed.OPTIONS[command].items():
        assert old not in known
        assert new in known if new else arguments(found)[-1].metavar == "OUT"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("merganser tra", "transplant-tokenizer"),
        ("merganser merge --over", "--overwrite"),
        ("merganser library b", "build"),
    ],
)
def test_a_shell_completes_commands_and_options(words: str, found: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_MERGANSER_COMPLETE": "complete_bash"}
    program = "import sys; from merganser.cli import main; sys.argv = ['merganser']; main()"
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True)
    assert found in done.stdout.split()
