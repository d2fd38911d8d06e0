"""Small models with cards, a recipe, and the merge of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.locked_models import make_models


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `base`, `math`, `code` and `recipe.yml`."""
    make_models(tmp_path)
    (tmp_path / "recipe.yml").write_text("method: dare_linear\nbase: base\nmodels: [math, code]\nseed: 5\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def edit_lock() -> Callable[..., None]:
    """`edit_lock(out, change)`: change the lock file of an output."""

    def edit(out: Path, change: Callable[[dict], object]) -> None:
        file = out / "merganser.lock.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return edit
