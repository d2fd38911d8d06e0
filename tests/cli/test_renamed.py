"""Old spellings: what they become, and the line that says so."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from merganser.cli import build
from merganser.cli.renamed import rewrite


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("experts list lib", "library list lib"),
        ("merge-lora a b --out c --rank 4", "merge-lora a b --rank 4 c"),
        ("merge-lora --out=c a b", "merge-lora a b c"),
        ("merge-lora --out c -- a b", "merge-lora -- a b c"),
        ("align a b --method weights --out c", "align a b --matching weights c"),
        ("demo --out d --overwrite", "demo --overwrite d"),
        ("evaluate m --parents a --parents=b --tasks t", "evaluate m --parent a --parent b --task t"),
        ("sweep r --budgets 50,200 --tasks t", "sweep r --rung 50 --rung 200 --task t"),
        ("serve lib --score logit", "serve lib --head-score logit"),
        ("sweep r --score a:b", "sweep r --score a:b"),
        ("merge recipe.yml out --resume", "merge recipe.yml out --resume"),
        ("merge-lora a --out", "merge-lora a --out"),
        ("--version", "--version"),
        ("", ""),
    ],
)
def test_old_spellings_become_new_ones(old: str, new: str) -> None:
    assert rewrite(old.split()) == new.split()
    assert rewrite(new.split()) == new.split()


def test_an_old_command_works_and_says_its_new_form() -> None:
    result = CliRunner().invoke(build(), ["experts", "list", "--help"])
    assert result.exit_code == 0
    assert result.stderr == "note: this command is now spelled: merganser library list --help\n"
    assert "note" not in result.stdout


def test_a_command_of_today_says_nothing() -> None:
    assert CliRunner().invoke(build(), ["library", "list", "--help"]).stderr == ""


def test_help_shows_no_old_name() -> None:
    shown = CliRunner().invoke(build(), ["--help"]).stdout
    assert "library" in shown
    assert "experts" not in {line.split()[0] for line in shown.splitlines() if line.split()}
