"""Every kind of report as a picture: it fits, it is small, axe-core finds nothing, and it asks nobody for anything."""

from __future__ import annotations

import json

import pytest
import torch

import merganser as mg
from merganser.interference import survey
from merganser.library import Library
from merganser.report.directories import report
from merganser.report.interference import fill
from merganser.report.page import Page
from support.chromium import AXE, VIEWS, audit, browser

__all__ = ["browser"]


def answer(candidate, items):
    """Candidates answer more questions the nearer their weights are to 1."""
    near = 0.5 if isinstance(candidate, str) else 1 - min(1, abs(sum(candidate.values()) / len(candidate) - 1))
    return {task: [float((7 * i) % 10 < 10 * near) for i in asked] for task, asked in items.items()}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of every kind, of results with long names."""
    from merganser.evolve import Design, Objective, Search, SearchParameter, Study, StudyTask

    folder = tmp_path_factory.mktemp("pages")
    torch.manual_seed(0)
    long = "an-expert-with-quite-a-long-name-v2"
    base = {
        **{f"model.layers.{i}.w.weight": torch.randn(48, 32) for i in range(12)},
        "model.norm.weight": torch.ones(32),
    }
    experts = {n: {k: t + 0.1 * torch.randn_like(t) for k, t in base.items()} for n in ("math", "law", long)}
    for name, state in {"base": base, **experts}.items():
        mg.save(state, folder / name)
    Library.build(folder / "base", {name: folder / name for name in experts}, folder / "library")
    models = [str(folder / name) for name in experts]
    mg.run({"method": "ties", "base": str(folder / "base"), "models": models}, folder / "merged")
    scores = [
        {"values": {"method": m, "weight": w}, "answers": [[float(i % 3 < 2) for i in range(40)]]}
        for m in ("ties", "a_method_of_another_package")
        for w in (0.2, 0.8)
    ]
    lines = [
        {**s, "label": str(s["values"]), "key": str(i), "budget": 40, "score": 0.6, "scored_by": "quiz"}
        for i, s in enumerate(scores)
    ]
    (folder / "a.sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = ("quiz", "sums")
    design = Design(
        space={"weight": SearchParameter(0, 2, per="model")},
        tasks={task: StudyTask(40) for task in tasks},
        objectives=tuple(map(Objective.of, tasks)),
        models={"math": "./math", long: f"./{long}"},
        search=Search("nsga2", population=5, generations=2),
    )
    with_study = Study.open(folder / "study.sqlite")
    with_study.run(design, answer)
    with_study.close()
    found = {name: report(folder / name)[0] for name in ("library", "merged", "a.sweep.jsonl", "study.sqlite")}
    found["interference"] = Page("Survey between experts")
    fill(found["interference"], survey(base, experts))
    return {name: page.write(folder / f"{name}.html") for name, page in found.items()}


def test_pages_are_small(pages):
    assert {name: file.stat().st_size for name, file in pages.items() if file.stat().st_size > 200_000} == {}


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_pages_fit_and_are_accessible(pages, browser, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    asked = []
    page.on("request", lambda request: request.url.startswith("file:") or asked.append(request.url))
    for name, file in pages.items():
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        page.evaluate(AXE.read_text())
        assert not (told := audit(page)), (name, told)
    context.close()
    assert not asked


def test_a_page_without_scripts_shows_everything_and_with_them_sorts_by_the_keyboard(pages, browser):
    plain = browser.new_context(java_script_enabled=False)
    page = plain.new_page()
    page.goto(pages["merged"].as_uri())
    assert page.get_by_role("img").count() >= 3
    plain.close()
    page = browser.new_context().new_page()
    page.goto(pages["library"].as_uri())
    head = page.locator("th", has_text="expert").first
    head.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    names = page.locator("tbody").first.locator("tr td:first-child").all_inner_texts()
    assert names == sorted(names, reverse=True)
    page.context.close()
