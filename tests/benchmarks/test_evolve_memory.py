"""Memory of workers: pages of files are found in the kernel's tables, and goals are judged by them."""

from __future__ import annotations

import mmap
import os

from benchmarks.evolve_memory import mapped
from benchmarks.reporting.parts import Text
from benchmarks.reporting.sections.evolution_memory import parts

PAGES = 64


def test_mapped_pages_of_a_file_are_counted(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * PAGES * mmap.PAGESIZE)
    assert mapped(os.getpid(), [path]) == (0, 0)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        assert sum(held[:: mmap.PAGESIZE]) == PAGES * ord("x")
        assert mapped(os.getpid(), [path]) == (PAGES * mmap.PAGESIZE, PAGES * mmap.PAGESIZE)
        assert mapped(os.getpid(), [tmp_path / "another"]) == (0, 0)


def row(workers, endpoints):
    return {"workers": workers, "files": 100, "resident": 100 * workers, "endpoints": endpoints, "private": 300}


def said(endpoints, low):
    bias = {"value": 0.0, "low": low, "high": 0.2}
    found = {"base": {"full": 0.5, "score": 0.5, "bias": bias, "changed": 0.0}}
    precision = {"forms": {"int8": found}, "seconds": {"full": 1.0, "int8": 2.0}, "items": 40}
    results = {"memory": [row(1, 100), row(2, endpoints)], "precision": precision, "skills": ["a", "b"]}
    return " ".join(part.text for part in parts(results) if isinstance(part, Text))


def test_sentences_follow_the_figures():
    assert "hold 1.05 copies of them in all" in said(105, -0.1)
    assert "a bias of: none of them" in said(105, -0.1)
    assert "a bias of: int8 base" in said(105, 0.1)
