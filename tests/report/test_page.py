"""Pages: their structure always, and in a real browser where there is one."""

import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser

import pytest

from merganser.report import Page
from merganser.report.charts import Dot, dot_plot
from merganser.report.tables import Link, Table

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Structure(HTMLParser):
    """Fails on tags that are not closed in order; collects tags, and text outside scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


def example():
    page = Page("A <title> & more", "First.\n\nSecond <b>paragraph</b>.")
    page.heading("Numbers")
    rows = [["layer.10", 2, 0.5], ["layer.9", 10, 1e-7], ["layer.<x>", 1, None]]
    page.table(["name", "count", "value"], rows, "Some numbers", best={"count": "max"})
    page.items(["one", "two & three"])
    page.code("a < b")
    return page


def test_everything_a_user_wrote_is_escaped_and_tags_close():
    found = Structure(example().render())
    text = " ".join(found.texts)
    for part in ("A <title> & more", "Second <b>paragraph</b>.", "layer.<x>", "two & three", "a < b"):
        assert part in text
    names = [tag for tag, _ in found.tags]
    assert names.count("p") == 2
    assert names.count("li") == 2
    assert "b" not in names


def test_cells_show_few_places_and_keep_the_whole_value_for_sorting():
    page = example().render()
    assert '<td data-value="1e-07">1e-07</td>' in page
    assert '<td data-value="0.5">0.500</td>' in page
    assert '<td class="best">10</td>' in page
    assert "None" not in page


def test_the_page_fits_a_phone_and_needs_nothing_from_elsewhere():
    found = Structure(example().render())
    viewport = next(attributes for tag, attributes in found.tags if attributes.get("name") == "viewport")
    assert "width=device-width" in viewport["content"]
    for _, attributes in found.tags:
        assert not {"src", "href"} & set(attributes)


def several():
    page = Page("Several", "An introduction.")
    rows = []
    for number, name in enumerate(["twice", "twice", "<odd> & top", "top", "…"]):
        with page.part(name) as anchor:
            page.heading("Weights")
            page.add(Table(["tensor"], [["a"], ["b"]], "Tensors"), folded=True)
        rows.append([Link(name, anchor), number / 2, None, "long words " * 9])
    page.overview(["name", "MiB", "nothing", "in short"], rows, "All of them")
    page.heading("After the parts")
    return page


def test_an_overview_leads_to_every_part_and_headings_inside_are_a_level_lower():
    found = Structure(several().render())
    ids = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    links = [attributes["href"] for tag, attributes in found.tags if tag == "a" and "class" not in attributes]
    assert len(set(ids)) == len(ids) == 5 + 5 + 1
    assert "top" not in ids
    parts = [attributes["id"] for tag, attributes in found.tags if tag == "h2"]
    assert [f"#{part}" for part in parts[:-1]] == links
    assert parts[-1] == "after-the-parts"
    assert [tag for tag, _ in found.tags].count("h3") == 5
    text = "\n".join(found.texts)
    assert text.index("An introduction.") < text.index("All of them") < text.index("Weights")
    assert "Tensors: 2 rows" in text


CHART = dot_plot([Dot("a", 1.0, 0.5, 1.5), Dot("b", 2.0)], "score", caption="caption")


def test_charts_cost_little_and_are_there_without_scripts():
    page = example()
    for _ in range(10):
        page.chart(CHART)
    text = page.render()
    assert len(text) < 200_000
    assert text.count('role="img"') == 10
    assert "<noscript>" not in text
    assert "http" not in text.replace("http://www.w3.org", "")
    Structure(text)


def test_a_table_as_text():
    lines = Table(["name", "value"], [["a", 1.0], ["long name", 12.3456], ["tiny", 1e-9]], "Title").text().splitlines()
    assert lines == ["Title", "name        value", "a           1.000", "long name  12.346", "tiny        1e-09"]


def dump(path, tmp_path):
    """The document of a page after its scripts have run."""
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [CHROMIUM, *FLAGS, profile, "--virtual-time-budget=10000", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_in_a_browser_tables_sort_by_buttons(tmp_path):
    page = example()
    page.chart(CHART)
    clicks = (
        "<script>const all = name => [...document.querySelectorAll(name)], heads = all('th button');"
        "const names = () => all('td').filter((_, i) => i % 3 == 0).map(c => c.textContent).join();"
        "const seen = []; for (const i of [0, 0, 1, 2]) { heads[i].click(); seen.push(names()); }"
        "document.body.dataset.seen = seen.join('|');"
        "document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;</script></body>"
    )
    path = tmp_path / "page.html"
    path.write_text(page.render().replace("</body>", clicks), encoding="utf-8")
    document = dump(path, tmp_path)
    seen = unescape(re.search(r'data-seen="([^"]*)"', document)[1]).split("|")
    assert sorted(seen[0].split(",")) == ["layer.10", "layer.9", "layer.<x>"]
    assert "layer.10,layer.9" in seen[0]
    assert seen[1] == ",".join(reversed(seen[0].split(",")))
    assert seen[2].startswith("layer.9,layer.10,")
    assert seen[3].startswith("layer.10,layer.9,")
    assert 'data-wide="false"' in document
    assert len(re.findall(r"<th [^>]*aria-sort=", document)) == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "scripts blocked"])
def test_on_a_phone_nothing_is_wider_than_the_screen(tmp_path, scripts):
    page = several()
    long = "a-checkpoint_" * 8
    with page.part(long) as anchor:
        page.heading(long)
    page.overview(["name", "MiB"], [[Link(long, anchor), 1.0]])
    page.items(["fingerprint " + "0123456789abcdef" * 8])
    page.table([f"column {i}" for i in range(12)], [[1.0] * 12])
    page.chart(CHART)
    rights = "allow-same-origin allow-scripts" if scripts else "allow-same-origin"
    style = "width:390px;height:800px;border:0"
    frame = f'<iframe sandbox="{rights}" style="{style}" srcdoc="{escape(page.render())}"></iframe>'
    look = (
        "<script>onload = () => { const inner = document.querySelector('iframe').contentDocument;"
        "const put = (name, value) => document.body.dataset[name] = value;"
        "put('wide', inner.documentElement.scrollWidth); put('tables', inner.querySelectorAll('td').length);"
        "const lists = [...inner.querySelectorAll('.overview')].map(list => list.parentElement);"
        "put('hidden', Math.max(...lists.map(list => list.scrollWidth - list.clientWidth)));"
        "put('figure', inner.querySelector('.chart svg').getBoundingClientRect().width); }</script>"
    )
    path = tmp_path / "phone.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{frame}{look}</body>", encoding="utf-8")
    document = dump(path, tmp_path)
    names = ("wide", "tables", "figure", "hidden")
    seen = {name: float(re.search(rf'data-{name}="([^"]*)"', document)[1]) for name in names}
    assert seen["wide"] <= 390
    assert seen["tables"] == 5 * 4 + 5 * 2 + 2 + 12
    assert seen["hidden"] <= 0
    assert seen["figure"] > 250
