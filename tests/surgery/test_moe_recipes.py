from __future__ import annotations

import pytest

from merganser.errors import RecipeError
from merganser.surgery.moe_recipes import _path


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("./a", "./a"),
        ("./a+./lora", "./a+./lora"),
        ({"model": "./a", "lora": "./lora"}, "./a+./lora"),
        ({"model": {"path": "./a"}, "lora": {"path": "./lora"}}, "./a+./lora"),
        ({"model": {"path": "owner/a", "revision": "v1"}}, "owner/a@v1"),
    ],
)
def test_a_model_keeps_its_adapter_and_revision(written: object, reference: str) -> None:
    assert _path(written, "experts[0].source_model") == reference


@pytest.mark.parametrize("written", [None, "", 3, {}, {"model": "./a", "lroa": "./lora"}, {"model": {}}])
def test_anything_else_is_refused(written: object) -> None:
    with pytest.raises(RecipeError, match="source_model"):
        _path(written, "experts[0].source_model")
