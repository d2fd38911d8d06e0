"""What the studio does between its start and the first view of the page."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from merganser.cli import studio


@pytest.fixture
def imported(monkeypatch):
    found = []
    monkeypatch.setattr(studio, "import_module", found.append)
    monkeypatch.setattr(studio, "QUIET", 0.2)
    return found


def test_torch_is_imported_only_after_the_first_view(imported):
    gate = SimpleNamespace(asked=None)
    waiting = threading.Thread(target=studio._import_torch, args=(gate,), daemon=True)
    waiting.start()
    for _ in range(4):  # nobody has asked, then requests follow each other
        waiting.join(0.1)
        assert imported == []
        gate.asked = time.monotonic()
    waiting.join(20)
    assert imported == ["torch"]


def test_every_request_counts_as_one(client):
    gate = client.app
    assert gate.asked is None
    client.get("/")
    first = gate.asked
    client.get("/api/jobs")
    assert gate.asked > first
