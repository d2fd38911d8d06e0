"""The examples run, and say what they should; the recipes of the documentation are recipes."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from merganser import recipes
from merganser.recipes import documents, mergekit

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Runs an example as a script in an empty directory, on networks of half their width; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("merganser.digits.WIDTH", 256)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def numbers(line):
    return [float(number) for number in re.findall(r"\d+\.\d+", line)]


def test_recipes_merge_language_models_that_generate(example):
    pytest.importorskip("transformers")
    lines = example("merge_llm").splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in (EXAMPLES / "recipes").glob("*.yml"))
    assert "6 layers" in next(line for line in lines if line.startswith("frankenmerge"))


def test_alignment_rescues_the_average(example):
    pytest.importorskip("sklearn")
    shown = {line[:22].strip(): line for line in example("align_networks").splitlines()}
    plain, aligned = (numbers(shown[key])[0] for key in ("plain average", "aligned average"))
    assert aligned > plain + 0.05
    assert shown["cycle error"].endswith(" 0")


def test_a_library_gives_its_experts_back(example):
    pytest.importorskip("sklearn")
    lines = example("expert_library").splitlines()
    space = next(line for line in lines if line.startswith("4 experts and their base in "))
    assert float(space.split()[6].rstrip("×")) <= 2.0
    assert space.endswith("the space of the base, instead of 5×")
    for task in ("upright", "flipped", "turned", "inverted", "mean"):
        base, expert, rebuilt, *_ = numbers(next(line for line in lines if line.startswith(task)))
        assert rebuilt > expert - 0.02 > base
    rebuilding, merging = numbers(lines[-1])
    assert 98 < rebuilding <= 101
    assert merging < rebuilding


def test_the_adaptive_model_beats_the_merge_on_average(example):
    pytest.importorskip("sklearn")
    rows = [numbers(line) for line in example("adaptive_model").splitlines()[1:]]
    assert len(rows) == 4
    assert sum(row[2] for row in rows) > sum(row[1] for row in rows)


def test_a_search_can_be_run_and_run_again(example):
    pytest.importorskip("sklearn")
    pytest.importorskip("pymoo")
    first = example("evolve_merge", "--generations", "2")
    assert "20 candidates, 90 questions each" in first
    assert re.search(r"the winner is (better|worse) than the best endpoint|cannot tell", first)
    assert example("evolve_merge", "--generations", "2") == first


def test_aligned_clients_average_better_from_the_first_round(example, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # Flower's simulation is not for a unit test
    *_, plain, aligned = example("federated_digits", "--rounds", "1").splitlines()
    assert numbers(aligned)[0] > numbers(plain)[0] + 0.2


def blocks():
    return re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_documentation_shows_recipes_of_both_dialects():
    assert {mergekit.recognises(documents.parse(text)[0]) for text in blocks()} == {False, True}


@pytest.mark.parametrize("text", blocks(), ids=lambda text: text.splitlines()[0])
def test_every_recipe_of_the_documentation_is_read(text):
    assert recipes.load(text).parts
