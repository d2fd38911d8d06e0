"""Constants of an architecture neither move nor are averaged; what belongs to units does."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm

from merganser.align import Symmetry, match, match_to_reference, merge_many, scramble, symmetry, transport, universe
from merganser.align.state import average
from merganser.errors import InputError

X = torch.randn(5, 3)


class Scaled(nn.Module):
    """Hidden units with a table of factors, one for each."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x)) * self.table
        return self.last(torch.relu(self.second(hidden)))


def scaled(seed: int) -> Scaled:
    torch.manual_seed(seed)
    return Scaled(10.0 ** -torch.arange(8.0))


def test_a_constant_pins_its_axis_and_stays() -> None:
    nets = [scaled(seed) for seed in range(3)]
    found = symmetry(nets[0], X)
    assert list(found.atoms) == ["second"]
    assert "axis 0 (8): pinned by the constant 'table'" in found.why("first.weight")
    assert torch.equal(scramble(nets[0], found).table, nets[0].table)
    for merged in (
        universe(nets, found).merged(),
        universe(nets, found).merged([0.2, 0.7, 0.1]),
        merge_many(nets, found).merged(),
        match_to_reference(nets, found).merged(),
        transport(nets[0], nets[1], nets[2], found),
        match(nets[0], nets[1], found).apply(nets[1]),
    ):
        assert torch.equal(merged["table"], nets[0].table)


def test_a_constant_that_is_the_same_for_all_units_does_not_pin() -> None:
    found = symmetry(Scaled(torch.full((8,), 0.5)), X)
    assert len(found.atoms) == 2


def test_a_buffer_that_belongs_to_units_can_be_named() -> None:
    net = Scaled(torch.randn(8))
    found = symmetry(net, X, moving_buffers=["tab*"])
    assert len(found.atoms) == 2
    assert found.free("table") == found.free("first.bias")
    with pytest.raises(InputError, match=r"no buffer matches 'tables'.*table"):
        symmetry(net, X, moving_buffers=["tables"])
    with pytest.raises(InputError, match=r"write moving_buffers=\['table'\]"):
        symmetry(net, X, moving_buffers="table")


def test_statistics_spectral_norm_and_pruning_masks_move() -> None:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    net[1].running_mean.normal_()
    prune.random_unstructured(net[3], "weight", 0.5)
    spectral_norm(net[5])
    found = symmetry(net, X)
    assert list(found.atoms) == ["0", "3"]
    assert found.free("1.running_mean") == {"0"}
    assert found.free("3.weight_mask") == {"0", "3"}
    assert found.free("5.parametrizations.weight.0._v") == {"3"}


class Frozen(nn.Module):
    """BatchNorm that never learns, as detection models have it: everything is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean) * self.weight * (self.running_var + 1e-5).rsqrt() + self.bias


def test_frozen_batch_norm_moves() -> None:
    found = symmetry(nn.Sequential(nn.Linear(3, 6), Frozen(), nn.ReLU(), nn.Linear(6, 2)), X)
    assert found.free("1.weight") == found.free("1.running_var") == {"0"}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6), st.integers(0, 100))
def test_the_mean_of_equal_tensors_is_that_tensor(count: int, weights: list[float], seed: int) -> None:
    table = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    mean = average([{"table": table, "other": torch.full((2,), float(i))} for i in range(count)], weights[:count])
    assert torch.equal(mean["table"], table)
    assert mean["table"].data_ptr() != table.data_ptr()
    expected = sum(i * w for i, w in enumerate(weights[:count])) / sum(weights[:count])
    assert torch.allclose(mean["other"], torch.full((2,), expected))


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


def tiny_esm(transformers: ModuleType, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.EsmConfig(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        position_embedding_type="rotary",
        pad_token_id=1,
        mask_token_id=2,
    )
    return transformers.EsmForMaskedLM(config).eval()


def test_rotary_frequencies_of_esm(transformers: ModuleType) -> None:
    """Rotary pairs no longer move; what was a permutation of them would have been averaged."""
    models = [tiny_esm(transformers, seed) for seed in range(3)]
    found: Symmetry = symmetry(models[0], torch.randint(4, 24, (2, 9)))
    tables = [name for name in found.axes if name.endswith("inv_freq")]
    assert tables
    assert not any(found.free(name) for name in tables)
    assert found.free("esm.encoder.layer.0.attention.self.value.weight")
    frequencies = models[0].state_dict()[tables[0]]
    for merged in (universe(models, found).merged(), merge_many(models[:2], found).merged()):
        assert all(torch.equal(merged[name], frequencies) for name in tables)
