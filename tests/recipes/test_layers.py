from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merganser.recipes.layers import find_layout, is_input


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        ("model.layers.{}.mlp.weight", "model.layers"),
        ("transformer.h.{}.attn.c_attn.bias", "transformer.h"),
        ("encoder.layer.{}.output.dense.weight", "encoder.layer"),
        ("blocks.{}.norm.weight", "blocks"),
        ("{}.weight", ""),
    ],
)
def test_the_stack_is_found_whatever_it_is_called(pattern, prefix):
    names = ["embed.weight", *(pattern.format(i) for i in range(12)), "head.weight"]
    found = find_layout(names)
    assert found.main is not None
    assert (found.main.prefix, found.main.layers) == (prefix, 12)
    place = found.places[pattern.format(11)]
    assert place.stack.name(11, place.rest) == pattern.format(11)
    assert place.stack.depth(place.number) == 1
    assert "embed.weight" not in found.places


def test_experts_inside_layers_are_not_layers():
    names = [f"model.layers.{i}.experts.{e}.w{k}.weight" for i in range(3) for e in range(8) for k in (1, 2, 3)]
    found = find_layout(names)
    assert found.main is not None
    assert (found.main.prefix, found.main.layers) == ("model.layers", 3)
    assert {place.stack.prefix for place in found.places.values()} == {"model.layers"}


def test_two_towers_have_a_stack_each():
    names = [f"vision.layers.{i}.w" for i in range(3)] + [f"text.layers.{i}.{w}" for i in range(5) for w in "ab"]
    found = find_layout(names)
    assert found.main is not None
    assert found.main.prefix == "text.layers"
    assert found.places["vision.layers.1.w"].stack.depth(1) == 0.5


def test_numbers_glued_to_words_count_when_they_are_the_main_stack():
    resnet = [f"layer{s}.{b}.conv{c}.weight" for s in range(1, 5) for b in range(2) for c in (1, 2)] + ["conv1.weight"]
    found = find_layout(resnet)
    assert found.main is not None
    assert (found.main.stem, found.main.numbers) == ("layer", (1, 2, 3, 4))
    assert found.places["layer3.1.conv2.weight"].stack.depth(3) == pytest.approx(2 / 3)
    whisper = [f"encoder.layers.{i}.{w}" for i in range(4) for w in "abc"] + ["encoder.conv1.w", "encoder.conv2.w"]
    assert "encoder.conv2.w" not in find_layout(whisper).places


def test_gaps_are_no_obstacle_to_depth():
    found = find_layout(["0.weight", "2.weight", "4.weight"])
    assert [found.places[f"{n}.weight"].stack.depth(n) for n in (0, 2, 4)] == [0, 0.5, 1]


@given(st.integers(1, 30), st.integers(1, 4))
def test_depth_is_the_share_of_layers_passed(layers, tensors):
    names = [f"model.layers.{i}.t{k}x.weight" for i in range(layers) for k in range(tensors)]
    found = find_layout(names)
    for name in names:
        place = found.places[name]
        expected = place.number / (layers - 1) if layers > 1 else 1.0
        assert place.stack.depth(place.number) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", True),
        ("transformer.wpe.weight", True),
        ("patch_embed.proj.weight", True),
        ("cls_token", True),
        ("conv1.weight", True),
        ("embeddings.LayerNorm.weight", True),
        ("lm_head.weight", False),
        ("embed_out.weight", False),
        ("model.norm.weight", False),
        ("transformer.ln_f.bias", False),
        ("classifier.weight", False),
        ("cls.predictions.bias", False),
    ],
)
def test_inputs_and_outputs_outside_the_stacks(name, expected):
    assert is_input(name) is expected
