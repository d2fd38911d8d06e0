"""Tiny models of more than a hundred architectures, merged, slerped and stacked, as transformers loads and runs them.

The suite takes every sixth of them; `MERGANSER_ARCHITECTURES=all` takes all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import merganser as mg
from merganser.errors import InputError
from support.architectures import ARCHITECTURES, part_of
from support.llamas import transformers  # noqa: F401
from support.tiny_models import tiny_inputs, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

#: Stacks that cannot be, and why.
REFUSED = {
    "JambaForCausalLM": "attn_layer_period: 3, expert_layer_period: 2",
    "AlbertForMaskedLM": "has no run of numbered layers",
    "EsmForMaskedLM": "'esm.contact_head.regression.weight' has a column for each head of each of the 3 layers",
    **dict.fromkeys(
        (
            f"{name}ForImageClassification"
            for name in ("ResNet", "RegNet", "ConvNext", "Swin", "Segformer", "PoolFormer")
        ),
        "stage",
    ),
}
ORDER = (0, 1, 1, 2)


def load(model: Any, out: Path) -> Any:
    """Load an output as the class of a model, without a weight missing or left over, and run it."""
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    assert not wrong, wrong
    with torch.no_grad():
        outputs = loaded.eval()(**tiny_inputs(loaded))
    first = next(value for value in outputs.values() if isinstance(value, torch.Tensor))
    assert torch.isfinite(first).all()
    return loaded


def check_stack(original: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> None:
    """Compare the weights of a stack of layers 0, 1, 1, 2 with those of three layers, name by name."""
    added = [name for name in made if name not in original]
    (prefix,) = {found[1] for name in added if (found := re.match(r"(.*?\b)3\.", name))}
    for name, value in made.items():
        layer = re.match(r"(\d+)(\..*)", name.removeprefix(prefix)) if name.startswith(prefix) else None
        source = f"{prefix}{ORDER[int(layer[1])]}{layer[2]}" if layer else name
        assert torch.equal(value, original[source]), name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.mark.parametrize("name", part_of(ARCHITECTURES, 6))
def test_merged_slerped_and_stacked(name: str, home: Path, transformers: Any) -> None:  # noqa: F811
    if (cls := getattr(transformers, name, None)) is None:
        pytest.skip(f"this version of transformers has no {name}")
    place = home / name
    first, second = (tiny_model(cls, ARCHITECTURES[name], seed) for seed in (0, 1))
    first.save_pretrained(place / "a")
    second.save_pretrained(place / "b")
    paths = [str(place / "a"), str(place / "b")]
    one, two = first.state_dict(), second.state_dict()
    for method, parameters in (("linear", {}), ("slerp", {"t": 0.4})):
        out = mg.run({"method": method, "models": paths, "parameters": parameters}, place / method)
        made = load(first, out).state_dict()
        assert list(made) == list(one)
        for key, value in made.items():
            if method == "linear" and value.is_floating_point():
                torch.testing.assert_close(value, (one[key] + two[key]) / 2, rtol=1e-5, atol=1e-6)
            elif value.is_floating_point() and not torch.equal(one[key], two[key]):
                assert not torch.equal(value, one[key]), key
    layers = ([0, 2], [1, 2]) if REFUSED.get(name) == "stage" else ([0, 2], [1, 3])
    stack = {"method": "passthrough", "slices": [{"path": paths[0], "layers": each} for each in layers]}
    if name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name]):
            mg.run(stack, place / "stack")
        return
    check_stack(one, load(first, mg.run(stack, place / "stack")).state_dict())
