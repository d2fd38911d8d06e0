"""A folder with a bit of everything, and the studio opened on it."""

from __future__ import annotations

import json
import shutil

import pytest

from support.llamas import llamas, transformers

__all__ = ["llamas", "transformers"]

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
TOKEN = "secret-of-the-tests"
MIX = {"method": "task_arithmetic", "base": "base", "models": [{"path": "math", "weight": 0.5}, {"path": "code"}]}


def answer(candidate, items):
    """Candidates answer more questions the nearer their weights are to 1."""
    near = 0.5 if isinstance(candidate, str) else 1 - min(1, abs(sum(candidate.values()) / len(candidate) - 1))
    return {task: [float((7 * i) % 10 < 10 * near) for i in asked] for task, asked in items.items()}


@pytest.fixture(scope="session")
def built(tmp_path_factory, llamas):
    """Three language models, a library of two experts, a study, recipes in both dialects, a quiz; never written to."""
    pytest.importorskip("pymoo")
    from merganser.evolve import Design, Objective, Search, SearchParameter, Study, StudyTask
    from merganser.library import Library

    folder = tmp_path_factory.mktemp("studio")
    for name in ("base", "math", "code"):
        shutil.copytree(llamas / name, folder / name)
    experts = {name: folder / name for name in ("math", "code")}
    Library.build(folder / "base", experts, folder / "library", copy_base=True)
    (folder / "recipe.yml").write_text("method: ties\nbase: base\nmodels: [math, code]\nparameters: {density: 0.5}\n")
    (folder / "kit.yml").write_text("merge_method: linear\nmodels:\n  - {model: math, parameters: {weight: 1}}\n")
    quiz = [{"question": f"w{i} w{i + 1}", "options": ["w1 w2", "w3"], "answer": i % 2} for i in range(20)]
    (folder / "quiz.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in quiz))
    design = Design(
        space={"weight": SearchParameter(0, 2, per="model")},
        tasks={"quiz": StudyTask(40)},
        objectives=(Objective.of("quiz"),),
        models={name: str(path) for name, path in experts.items()},
        search=Search(population=5, generations=2),
    )
    study = Study.open(folder / "study.sqlite")
    study.run(design, answer)
    study.close()
    return folder


@pytest.fixture
def folder(tmp_path, built):
    return shutil.copytree(built, tmp_path / "models")


@pytest.fixture
def client(folder, tmp_path):
    from starlette.testclient import TestClient

    from merganser.studio.app import create_app

    app = create_app([folder], tmp_path / "state", TOKEN)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url="http://127.0.0.1:8765", headers=headers) as opened:
        yield opened


def events(response):
    """The server-sent events of an answer."""
    assert response.status_code == 200, response.text
    return [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n") if block]
