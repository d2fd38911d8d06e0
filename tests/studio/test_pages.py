"""The page itself, in Chromium: every screen, narrow and wide, light and dark; nothing leaves this machine."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest

from support.chromium import AXE, VIEWS, audit, browser

__all__ = ["browser"]
PATIENCE = 240_000
#: Screen -> what is on it once it is there.
SCREENS = {
    "home": "Checkpoints",
    "checkpoint?path=math": "Layer map",
    "checkpoint?path=base&other=math": "Where they differ",
    "recipe?path=recipe.yml": "at most",
    "recipe?path=kit.yml": "Translated from mergekit",
    "mixer": "tensors merged again",
    "compare": "Ask all",
    "interference": "Measure",
    "library": "Build a library",
    "library?path=library": "A smaller budget",
    "evolve?path=study.sqlite": "Winner",
    "landscape": "Draw the line",
    "jobs": "No jobs yet",
}


class Server:
    """`merganser studio` on a folder, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "merganser", "studio", str(self.folder), "--port", str(self.port), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = json.loads(self.process.stdout.readline())["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory, built):
    started = Server(shutil.copytree(built, tmp_path_factory.mktemp("page") / "models"))
    yield started
    started.kill()


@pytest.fixture
def visit(browser):
    """Opens a page that fails the test on errors of scripts and on requests to anywhere else."""
    wrong, contexts = [], []

    def open_page(server, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: urlparse(r.url).hostname == "127.0.0.1" or wrong.append(r.url))
        page.goto(server.url)
        page.wait_for_selector("h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def show(page, screen):
    page.evaluate("hash => { location.hash = hash }", f"#/{screen}")
    page.get_by_text(SCREENS[screen]).first.wait_for()


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_every_screen_fits_and_is_accessible(server, visit, width, scheme):
    page = visit(server, width, scheme)
    page.add_init_script(path=AXE)
    page.evaluate(AXE.read_text())
    for screen in SCREENS:
        show(page, screen)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, screen
        assert not (told := audit(page)), (screen, told)


def test_without_the_token_the_page_says_what_to_do(server, browser):
    page = browser.new_context().new_page()
    page.goto(server.url.partition("#")[0])
    page.get_by_text("open the address that `merganser studio` printed").wait_for(timeout=PATIENCE)


def test_from_a_folder_to_a_merged_model(server, visit):
    page = visit(server)
    page.get_by_role("link", name="Write a recipe").click()
    yaml = page.get_by_label("Recipe as YAML")
    page.get_by_text("at most").wait_for()
    page.get_by_label("Method", exact=True).select_option("task_arithmetic")
    page.get_by_label("Base", exact=False).first.select_option("base")
    page.get_by_text("task_arithmetic × ").wait_for()
    yaml.fill("method: tiez\nmodels: [math]\n")
    page.get_by_text("did you mean 'ties'").wait_for()
    yaml.fill("method: ties\nbase: base\nmodels:\n  - {path: math, weight: 0.7}\n  - code\n")
    page.get_by_text("ties × ").wait_for()
    page.get_by_label("Merge into").fill("merged")
    page.get_by_role("button", name="Merge", exact=True).click()
    page.get_by_role("button", name="Open the result").wait_for()
    assert (server.folder / "merged" / "config.json").is_file()
    page.get_by_role("button", name="Open the result").click()
    page.get_by_role("heading", name="merged").wait_for()
    page.get_by_text("Made by").wait_for()
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_role("button", name="Forget Merge into merged").click()
    page.get_by_text("No jobs yet").wait_for()
    shutil.rmtree(server.folder / "merged")


def test_the_mixer_follows_a_slider_and_pins(server, visit):
    page = visit(server)
    show(page, "mixer")
    page.get_by_label("Prompt").fill("w1 w2")
    page.get_by_role("button", name="Pin as A").click()
    slider = page.get_by_role("slider", name="weight").first
    with page.expect_request(lambda r: r.url.endswith("/api/play") and '"weight":1.5' in (r.post_data or "")):
        slider.press("End")
    page.get_by_role("heading", name="Pin A").wait_for()
    page.get_by_role("button", name="To a recipe").click()
    page.get_by_text("task_arithmetic × ").wait_for()
    assert "weight: 1.5" in page.get_by_label("Recipe as YAML").input_value()


def test_a_recipe_of_mergekit_opens_in_the_mixer_with_its_own_numbers(server, visit):
    page = visit(server)
    page.get_by_role("link", name="Write a recipe").click()
    models = "models:\n  - {model: ./math, parameters: {weight: 0.7, density: 0.6}}\n"
    written = f"merge_method: ties\nbase_model: ./base\n{models}"
    page.get_by_label("Recipe as YAML").fill(written + "  - {model: ./code, parameters: {weight: 0.2}}\n")
    page.get_by_text("Translated from mergekit").wait_for()
    page.get_by_role("button", name="Open in the mixer").click()
    page.get_by_text("tensors merged again").first.wait_for()
    assert page.get_by_label("Base").input_value() == "base"
    weights = page.get_by_label("weight, number")
    assert [weights.nth(i).input_value() for i in range(2)] == ["0.7", "0.2"]


@pytest.mark.parametrize(
    ("screen", "label"), [("interference", "Base"), ("library", "Base"), ("landscape", "From"), ("compare", "Base")]
)
def test_a_family_that_is_found_late_does_not_replace_a_choice(server, visit, screen, label):
    page = visit(server)
    held = []
    page.route("**/api/family", lambda route: held.append(route))
    show(page, screen)
    if screen == "compare":
        page.get_by_role("button", name="X/Y grid").click()
    choice = page.get_by_label(label, exact=True)
    choice.select_option("code")
    page.wait_for_timeout(100)
    with page.expect_response("**/api/family"):
        held[0].continue_()
    page.wait_for_timeout(300)
    assert choice.input_value() == "code"


def test_a_grid_over_a_family_is_ready_to_be_filled(server, visit):
    page = visit(server)
    show(page, "compare")
    page.get_by_role("button", name="X/Y grid").click()
    page.get_by_role("button", name="Fill the grid").click()
    page.get_by_role("button", name="Stop").wait_for(state="detached")
    assert page.locator(".grid-table td").count() == 9
    assert page.get_by_label("Across", exact=True).input_value() == "weight of code"
    assert page.get_by_label("Down", exact=True).input_value() == "weight of math"


def test_a_survey_is_shown_where_it_was_asked_for(server, visit):
    page = visit(server)
    show(page, "interference")
    page.get_by_label("math").check()
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("heading", name="Layers × pairs").wait_for()


def test_a_merge_into_a_directory_that_exists_asks_first(server, visit):
    page = visit(server)
    show(page, "recipe?path=recipe.yml")
    page.get_by_label("Merge into").fill("code")
    page.get_by_role("button", name="Merge", exact=True).click()
    page.get_by_text("code exists already").wait_for()


def test_a_way_downhill_has_no_barrier(server, visit):
    page = visit(server)
    show(page, "landscape")
    page.get_by_label("Points, number").fill("3")
    page.get_by_label("From").select_option("base")
    page.get_by_label("To", exact=True).select_option("math")
    with page.expect_response(lambda r: r.url.endswith("/api/play")) as answer:
        page.get_by_role("button", name="Draw the line").click()
    page.get_by_text("Barrier to math").wait_for()
    events = [json.loads(line[6:]) for line in answer.value.text().split("\n\n") if line.startswith("data: ")]
    first, middle, last = (e["loss"] for e in events if e["event"] == "loss")
    rises = middle > (first + last) / 2
    assert page.get_by_text("the loss rises up to" if rises else "none, the loss stays below").is_visible()


def test_a_plane_has_its_models_on_it(server, visit):
    page = visit(server)
    show(page, "landscape")
    page.get_by_label("Points, number").fill("3")
    for label, model in (("From", "base"), ("To", "math"), ("Third, for a plane", "code")):
        page.get_by_label(label, exact=True).select_option(model)
    with page.expect_request("**/api/play") as asked:
        page.get_by_role("button", name="Draw the plane, 5 × 5").click()
    documents = [tuple(m["weight"] for m in each["models"]) for each in asked.value.post_data_json["documents"]]
    assert len(documents) == 25
    marks = page.locator(".heat-mark")
    marks.nth(2).wait_for()
    frame = page.locator(".heat-frame canvas").bounding_box()
    for mark, weights in zip(marks.all(), [(1, 0, 0), (0, 1, 0), (0, 0, 1)], strict=True):
        box = mark.bounding_box()
        x, y = (box["x"] + box["width"] / 2 - frame["x"], box["y"] + box["height"] / 2 - frame["y"])
        column, row = int(5 * x / frame["width"]), int(5 * y / frame["height"])
        assert documents[5 * row + column] == weights, mark.inner_text()


def test_the_form_and_the_text_of_a_recipe_follow_each_other(server, visit):
    page = visit(server)
    show(page, "recipe?path=recipe.yml")
    yaml = page.get_by_label("Recipe as YAML")
    page.get_by_text("dtype, tokenizer").click()
    page.get_by_label("dtype").select_option("float16")
    page.wait_for_function("() => [...document.querySelectorAll('textarea')].some(t => t.value.includes('float16'))")
    page.get_by_label("Method", exact=True).select_option("iso_cts")
    page.get_by_text("iso_cts × ").wait_for()
    page.get_by_label("common_fraction, number").wait_for()
    yaml.fill("method: ties\nbase: base\nmodels: [math, code]\nparameters: {density: 7}\n")
    page.get_by_text("Line 4.").wait_for()
    yaml.fill("method: slerp\nmodels: [math, code]\nparameters: {t: 0.25}\n")
    page.get_by_text("slerp × ").wait_for()
    assert page.get_by_label("t, number", exact=True).input_value() == "0.25"


def test_a_picture_stays_where_it_is_under_the_pointer(server, visit):
    page = visit(server)
    page.set_viewport_size({"width": 1280, "height": 420})
    show(page, "checkpoint?path=base&other=math")
    page.locator(".tile").get_by_text(re.compile(r"\d+ of \d+")).wait_for()  # all tensors are compared
    picture = page.locator("canvas").first
    page.evaluate("document.querySelectorAll('.card').forEach((c, i) => i && c.remove())")  # the end of the page
    picture.hover(position={"x": 10, "y": 8})
    page.locator(".heat-cell").wait_for()
    tall = page.evaluate("document.documentElement.scrollHeight")
    page.mouse.move(0, 0)
    page.locator(".heat-cell").wait_for(state="detached")
    assert page.evaluate("document.documentElement.scrollHeight") == tall


def test_two_pinned_mixes_answer_the_same_questions(server, visit):
    page = visit(server)
    show(page, "mixer")
    page.get_by_label("Prompt").fill("w1 w2")
    page.get_by_label("Questions").select_option("quiz.jsonl")
    page.get_by_text("20 of 20 items").first.wait_for()
    page.get_by_role("button", name="Pin as A").click()
    page.get_by_role("slider", name="weight").first.press("End")
    page.get_by_text("95 % interval").first.wait_for()
    page.get_by_text("20 of 20 items").first.wait_for()
    page.get_by_role("button", name="Pin as B").click()
    page.get_by_role("heading", name="A or B").wait_for()
    page.get_by_role("button", name="Ask both").click()
    page.get_by_text("95 % interval").first.wait_for()


def test_a_job_goes_on_when_the_server_is_killed(tmp_path, built, visit):
    started = Server(shutil.copytree(built, tmp_path / "models"))
    try:
        page = visit(started)
        show(page, "recipe?path=recipe.yml")
        page.get_by_label("Merge into").fill("survivor")
        page.get_by_role("button", name="Merge", exact=True).click()
        page.get_by_role("heading", name="Merge into survivor").wait_for()
        started.kill()
        page.get_by_text("The studio does not answer").wait_for()
        started.start()
        page.get_by_role("button", name="Open the result").wait_for()
        assert (started.folder / "survivor").is_dir()
    finally:
        started.kill()
