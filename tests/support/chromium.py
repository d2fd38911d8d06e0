"""Debian's Chromium driven by Playwright, and axe-core, which looks for what keeps people from using a page."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt install chromium", allow_module_level=True)

AXE = Path(__file__).parents[1] / "studio" / "vendor" / "axe.min.js"
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGS += ["--disable-component-update", "--disable-sync"]
#: Widths and colours that every page is looked at in.
VIEWS = [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield opened
        opened.close()


def audit(page):
    """Return what axe-core finds wrong with a page that has loaded it."""
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "nothing was looked at"
    return [(v["id"], [node["html"][:120] for node in v["nodes"]][:3]) for v in found["violations"]]
