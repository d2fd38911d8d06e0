from __future__ import annotations

import pytest

from merganser.errors import RecipeError
from merganser.surgery.moe_recipes import load_moe, read_path


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
    assert read_path(written, "experts[0].source_model") == reference


@pytest.mark.parametrize("written", [None, "", 3, {}, {"model": "./a", "lroa": "./lora"}, {"model": {}}])
def test_anything_else_is_refused(written: object) -> None:
    with pytest.raises(RecipeError, match="source_model"):
        read_path(written, "experts[0].source_model")


def test_low_rank_experts_are_refused_with_the_reason() -> None:
    experts = [{"source_model": "a"}, {"source_model": "b"}]
    document = {"base_model": "base", "gate_mode": "random", "experts": experts, "expert_rank": 8}
    with pytest.raises(RecipeError, match="expert_rank: no mixture that transformers loads has experts of low rank"):
        load_moe(document)


@pytest.mark.parametrize("key", ["noise_scale", "residual_scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "much", [1.0]])
def test_scales_are_finite_numbers(key: str, value: object) -> None:
    """A scale that is not finite would write an expert without a finite weight."""
    experts = [{"source_model": "a", key: value}, {"source_model": "b"}]
    with pytest.raises(RecipeError, match=rf"experts\[0\]\.{key}: expected a finite number"):
        load_moe({"base_model": "base", "gate_mode": "random", "experts": experts})


def test_a_scale_may_be_quoted() -> None:
    experts = [{"source_model": "a", "residual_scale": "0.5"}, {"source_model": "b"}]
    assert load_moe({"base_model": "base", "gate_mode": "random", "experts": experts}).experts[0].scale == 0.5
