"""Only what reaches an output that counts pins units, and the symmetry says what does."""

from __future__ import annotations

from collections import namedtuple
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from merganser.align import Symmetry, self_test, symmetry
from merganser.align.symmetries import Factor, product
from merganser.errors import InputError, MerganserError

X = torch.randn(4, 3)
Pair = namedtuple("Pair", "logits hidden")


class Net(nn.Module):
    """A classifier that can return its hidden units too."""

    def __init__(self, shape: str = "dict") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        logits = self.last(hidden)
        if self.shape == "nested":
            return {"logits": logits, "more": {"states": [x, hidden]}}
        return {"dict": {"logits": logits, "hidden": hidden}, "tuple": (logits, hidden), "named": Pair(logits, hidden)}[
            self.shape
        ]


class Dead(nn.Module):
    """Computes things nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused_head = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        self.last(hidden.flip(-1))
        hidden[:, -1].sort()
        self.unused_head(hidden)
        return self.last(hidden)


@pytest.mark.parametrize("shape", ["dict", "tuple", "named", "nested"])
def test_all_outputs_count_unless_chosen(shape: str) -> None:
    net = Net(shape)
    whole = symmetry(net, X)
    assert not whole.atoms
    output = {"dict": "hidden", "tuple": "1", "named": "hidden", "nested": "more.states.1"}[shape]
    assert f"axis 0 (6): pinned by the output '{output}'" in whole.why("first.bias")
    choice = "0" if shape == "tuple" else "logits"
    for outputs in (choice, [choice], lambda out: out[0] if isinstance(out, tuple) else out["logits"]):
        found = symmetry(net, X, outputs=outputs)
        assert list(found.atoms) == ["first"]
        assert self_test(net, found, X, outputs=outputs).verdict == "passed"
    with pytest.raises(MerganserError, match="failed its self-test"):
        self_test(net, found, X)


def test_a_choice_that_is_none_is_explained() -> None:
    with pytest.raises(InputError, match=r"no output 'logit'; it returns logits, hidden; did you mean 'logits'\?"):
        symmetry(Net(), X, outputs="logit")
    with pytest.raises(InputError, match=r"fails: KeyError\('nothing'\); it returns logits, hidden"):
        symmetry(Net(), X, outputs=lambda out: out["nothing"])
    with pytest.raises(InputError, match="chooses and does not compute"):
        symmetry(Net(), X, outputs=lambda out: out["logits"] * 2)
    with pytest.raises(InputError, match="chooses no tensor"):
        symmetry(Net(), X, outputs=[])
    with pytest.raises(InputError, match="one tensor without a name"):
        symmetry(nn.Linear(3, 2), X, outputs="logits")
    with pytest.raises(InputError, match="outputs are names"):
        symmetry(Net(), X, outputs=[0])  # type: ignore[list-item]


def test_dead_operations_do_not_pin_and_dead_heads_move_along() -> None:
    found = symmetry(Dead(), X)
    assert list(found.atoms) == ["first"]
    assert found.free("unused_head.weight") == {"first"}


def test_operations_that_write_are_not_dead() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden[:, 0].mul_(3.0)
            return self.last(hidden)

    found = symmetry(Writes(), X)
    assert not found.free("first.weight") or "partly" in found.why("first.weight")


def test_why_names_inputs_operations_and_hands() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.spare = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.b(self.a(x).relu()))
            return self.c(hidden.cummax(-1).values)

    found = symmetry(Sorted(), X)
    assert found.why("a.weight") == "a.weight\n  axis 0 (6): moves with a\n  axis 1 (3): pinned by the input 'x'"
    by = found.why("b.bias")
    assert "pinned by the operation" in by
    assert "cummax" in by
    assert "test_outputs.py:" in by
    assert "which do not use it" in found.why("spare.weight")
    assert "axis 0 (2): pinned by the output" in found.why("c.bias")
    assert "moves with a; " not in found.pin("a").why("a.weight")
    assert "pinned by a call of pin" in found.pin("a").why("a.weight")
    again = Symmetry.from_json(found.to_json())
    assert all(again.why(name) == found.why(name) for name in found.axes)
    by_hand = found.extend(axes={"c.bias": [product(Factor(None, 2))]})
    assert "said of this tensor by hand" in by_hand.why("c.bias")
    with pytest.raises(InputError, match="did you mean 'a.weight'"):
        found.why("a.weigth")


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


TOKENS = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def moving(found: Symmetry) -> int:
    return sum(bool(found.free(name)) for name in found.axes)


def test_bart_has_dead_position_lookups(transformers: ModuleType) -> None:
    net = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=40,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=32,
        )
    )
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
    found = symmetry(net, inputs, outputs="logits")
    assert moving(found) == len(found.axes) - 1  # final_logits_bias belongs to the vocabulary
    whole = symmetry(net, inputs)
    assert "pinned by the output 'encoder_last_hidden_state'" in whole.why("model.shared.weight")


def test_t5_and_clip_by_their_logits(transformers: ModuleType) -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
    found = symmetry(t5, inputs, outputs="logits")
    assert moving(found) == len(found.axes)
    assert moving(symmetry(t5, inputs)) < len(found.axes)
    part = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**part, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39},
            vision_config={**part, "image_size": 16, "patch_size": 8},
            projection_dim=16,
        )
    )
    both = {"input_ids": TOKENS, "pixel_values": torch.randn(2, 3, 16, 16)}
    found = symmetry(clip, both, outputs=["logits_per_image", "logits_per_text"])
    assert moving(found) == len(found.axes) - 1  # the temperature is a scalar
    assert not symmetry(clip, both).free("visual_projection.weight") >= found.free("visual_projection.weight")
