"""The command line starts quickly because nothing heavy is imported before a command runs."""

import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from merganser.cli import COMMANDS, build

HEAVY = ("torch", "numpy", "scipy", "transformers", "plotly", "sklearn", "pymoo", "ray", "yaml", "pydantic")


def test_no_command_module_imports_anything_heavy():
    script = f"import sys; from merganser.cli import build; build(); print([m for m in {HEAVY!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_the_engine_and_its_methods_start_without_scipy():
    script = "import sys, merganser.recipes.running; print('scipy.linalg' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"


def test_a_look_at_a_study_does_not_wait_for_the_distributions_of_scipy():
    pytest.importorskip("scipy")
    script = "import sys, merganser.evolve.study, merganser.report.studies; print('scipy.stats' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"


def test_an_unknown_document_is_named_without_words_of_a_library():
    result = CliRunner().invoke(build(), ["schema", "recpie"])
    assert str(result.exception) == "unknown document 'recpie'; did you mean 'recipe'?"


def test_every_command_has_help():
    app = build()
    for name in COMMANDS:
        result = CliRunner().invoke(app, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert "Usage" in result.output


def commands(group):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{group.name} {inner}", found) for inner, found in commands(command))
        else:
            yield name, command


def test_arguments_are_called_in_usage_what_help_texts_call_them():
    for name, command in commands(get_command(build())):
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                assert parameter.metavar, f"{name}: {parameter.name}"
                assert parameter.metavar == parameter.metavar.upper()
