"""Functions of the user's own, by name."""

from __future__ import annotations

import sys

import pytest

from merganser.errors import InputError
from merganser.evaluate.references import import_function


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory that Python does not search by itself, as for an installed command."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_modules_of_the_current_directory_are_found(here):
    (here / "own_functions").mkdir()
    (here / "own_functions" / "scores.py").write_text("def score(weights, budget):\n    return budget\n")
    assert import_function("own_functions.scores:score")({}, 7) == 7
    assert import_function("json:dumps")([1]) == "[1]"


def test_a_directory_is_searched_once(here):
    for _ in range(2):
        import_function("json:dumps")
    assert sys.path.count(str(here)) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("broken_functions", "^--score broken_functions: expected package.module:function"),
        (":f", "expected package.module:function"),
        ("nowhere.at.all:f", "no module 'nowhere.at.all' here or installed"),
        ("./nets/small.py:f", "a module is named as in an import: nets.small:f"),
        ("broken_functions:f", "importing 'broken_functions' failed: No module named 'absent_dependency'"),
        ("failing_functions:f", "importing 'failing_functions' failed: ValueError: no"),
        ("json:dump5", "'json' has no function 'dump5'; did you mean 'dump"),
        ("json:__name__", "has no function '__name__'"),
    ],
)
def test_mistakes(here, reference, message):
    (here / "broken_functions.py").write_text("import absent_dependency\n")
    (here / "failing_functions.py").write_text("raise ValueError('no')\n")
    with pytest.raises(InputError, match=message):
        import_function(reference, "--score")
