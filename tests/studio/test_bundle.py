"""The page that is shipped is small, names no other machine, and is what its sources build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import merganser

STATIC = Path(merganser.__file__).parent / "studio" / "static"
SOURCES = Path(__file__).parents[2] / "studio"


def test_the_bundle_is_small():
    assert sum(file.stat().st_size for file in STATIC.iterdir()) <= 200_000


def test_the_bundle_names_no_other_machine():
    text = "".join(file.read_text(encoding="utf-8") for file in STATIC.iterdir())
    hosts = set(re.findall(r"https?://([\w.-]+)", text))
    assert hosts <= {"www.w3.org"}, "names of XML are no addresses"


def test_the_bundle_is_what_its_sources_build(tmp_path):
    if shutil.which("node") is None or not (SOURCES / "node_modules" / "esbuild").is_dir():
        pytest.skip("needs node and `npm ci` in studio/")
    subprocess.run(["node", str(SOURCES / "build.mjs"), str(tmp_path)], check=True, capture_output=True)
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f.name for f in STATIC.iterdir())
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (STATIC / file.name).read_bytes(), f"{file.name}: run npm run build in studio/"
