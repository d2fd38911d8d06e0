"""Recurrent layers and cells, weight norm, bags of embeddings, scattered sums: their units move."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from derivation_nets import freedom
from torch import Tensor, nn

from merganser.align import match, scramble, symmetry

X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones; `also` reads its last states too."""

    def __init__(self, layer: nn.Module, width: int, also: bool = False) -> None:
        super().__init__()
        self.read, self.layer, self.write = nn.Linear(6, 7), layer, nn.Linear(width, 2)
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.layer(self.read(x).tanh())
        result = self.write(out)
        states = last if isinstance(last, tuple) else (last,)
        return result + sum(state.square().sum() for state in states) if self.also else result


# Every pair of options occurs.
@pytest.mark.parametrize(
    ("bidirectional", "batch_first", "also"),
    [(False, False, False), (True, True, False), (True, False, True), (False, True, True)],
)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_layers(kind: Any, bidirectional: bool, batch_first: bool, also: bool) -> None:
    """The reader's units, and one order for each layer and direction; the self-test proves them."""
    layer = kind(7, 8, num_layers=2, bidirectional=bidirectional, batch_first=batch_first)
    found = symmetry(Recurrent(layer, 16 if bidirectional else 8, also), X)
    assert sorted(freedom(found).values()) == sorted([(7,), *[(8,)] * (4 if bidirectional else 2)])


@pytest.mark.parametrize("options", [{"bias": False}, {"proj_size": 5}, {"nonlinearity": "relu"}, {"dropout": 0.1}])
def test_options_of_layers(options: dict[str, Any]) -> None:
    kind = nn.RNN if "nonlinearity" in options else nn.LSTM
    layer = kind(7, 8, num_layers=2, batch_first=True, **options)
    found = symmetry(Recurrent(layer, options.get("proj_size", 8), also=True), X)
    projected = [(5,), (5,)] if "proj_size" in options else []
    assert sorted(freedom(found).values()) == sorted([(7,), (8,), (8,), *projected])


def test_a_sequence_without_a_batch() -> None:
    found = symmetry(Recurrent(nn.GRU(7, 8), 8), X[0])
    assert sorted(freedom(found).values()) == [(7,), (8,)]


class Unrolled(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.read, self.cell, self.write = nn.Linear(6, 7), cell, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(3):
            state = self.cell(self.read(x[:, t]).tanh(), state)
        return self.write(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_cells(kind: Any, bias: bool) -> None:
    found = symmetry(Unrolled(kind(7, 8, bias=bias)), X)
    assert sorted(freedom(found).values()) == [(7,), (8,)]


def test_an_initial_state_that_is_given_pins_its_units() -> None:
    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.write = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return self.write(self.layer(x, state)[0])

    assert freedom(symmetry(Started(), [X, torch.randn(1, 3, 8)])) == {}


def test_a_learnt_initial_state_moves_along() -> None:
    """The states of both layers are one tensor, whose last axis has one order: the layers share it."""

    class Learnt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.write = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 2)
            self.h, self.c = (nn.Parameter(torch.randn(2, 1, 8)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            states = tuple(state.expand(-1, len(x), -1).contiguous() for state in (self.h, self.c))
            return self.write(self.layer(x, states)[0])

    found = symmetry(Learnt(), X)
    assert list(freedom(found).values()) == [(8,)]
    assert found.free("h") == found.free("c") == frozenset(found.atoms)


def test_recurrent_networks_are_matched() -> None:
    net = Recurrent(nn.LSTM(7, 12, num_layers=2, batch_first=True), 12).eval()
    found = symmetry(net, X)
    twin = scramble(net, found, seed=2)
    assert torch.allclose(twin(X), net(X), atol=1e-5)
    back = match(net, twin, found).apply(twin)
    assert all(torch.equal(back[name], tensor) for name, tensor in net.state_dict().items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_weight_norm(wrap: Any, dim: int | None) -> None:
    net = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), wrap(nn.Linear(7, 8), dim=dim), nn.ReLU(), nn.Linear(8, 2))
    assert sorted(freedom(symmetry(net, X)).values()) == [(7,), (8,)]


@pytest.mark.filterwarnings("ignore")
def test_weight_norm_of_a_convolution() -> None:
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 8, 3))
    net = nn.Sequential(convolution, nn.ReLU(), nn.Conv1d(8, 2, 1))
    assert list(freedom(symmetry(net, torch.randn(2, 6, 9))).values()) == [(8,)]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(9, 8, mode=mode), nn.Linear(8, 2)

        def forward(self, tokens: Tensor, offsets: Tensor | None = None) -> Tensor:
            return self.head(self.bag(tokens, offsets))

    rows = torch.arange(8).reshape(2, 4)
    assert freedom(symmetry(Bag(), rows)) == {"bag": (8,)}
    assert freedom(symmetry(Bag(), [rows.flatten(), torch.tensor([0, 3])])) == {"bag": (8,)}


class Scattered(nn.Module):
    """Messages of the rows, summed where an index says, by one of torch's ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.read, self.write, self.way = nn.Linear(6, 8), nn.Linear(8, 2), way

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        messages = self.read(x).relu()
        sums = torch.zeros(4, messages.shape[1], dtype=messages.dtype)
        wide = index[:, None].expand(-1, messages.shape[1])
        if self.way == "index_add":
            sums = sums.index_add(0, index, messages)
        elif self.way == "index_add_":
            sums.index_add_(0, index, messages)
        elif self.way == "scatter_add":
            sums = sums.scatter_add(0, wide, messages)
        elif self.way == "gather":
            sums = messages.gather(0, wide)
        else:
            sums = sums.index_copy(0, index, messages)
        return self.write(sums)


@pytest.mark.parametrize("way", ["index_add", "index_add_", "scatter_add", "gather", "index_copy"])
def test_scattered_sums(way: str) -> None:
    index = torch.tensor([2, 0, 1]) if way == "index_copy" else torch.tensor([2, 0, 2])
    net = Scattered(way)
    assert freedom(symmetry(net, [X[:, 0], index])) == {"read": (8,)}
    before = copy.deepcopy(net.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_an_axis_that_is_written_to_by_index_stays() -> None:
    """Two rows written into a table of units: the table's rows are told apart."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.write = nn.Parameter(torch.randn(4, 6)), nn.Linear(4, 2)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.write(self.table.index_add(0, index, x).T)

    assert freedom(symmetry(Table(), [X[:, 0], torch.tensor([2, 0, 2])])) == {}


class Picked(nn.Module):
    """Units picked by positions that the program fixes, each run read by a layer of its own."""

    def __init__(self, *picks: list[int]) -> None:
        super().__init__()
        self.read, self.picks = nn.Linear(6, 9), picks
        self.write = nn.ModuleList(nn.Linear(len(pick), 2) for pick in picks)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.read(x).relu()
        return sum(layer(hidden[..., pick]) for layer, pick in zip(self.write, self.picks, strict=True))


def test_runs_of_fixed_positions_are_parts_of_an_axis() -> None:
    found = symmetry(Picked([0, 1, 2, 3], [4, 5, 6], [-2, -1]), X)
    assert sorted(freedom(found).values()) == [(2,), (3,), (4,)]


@pytest.mark.parametrize("picks", [([0, 2, 1], [3, 4, 5, 6, 7, 8]), ([0, 1, 2], [3, 4, 5, 6])])
def test_positions_out_of_order_and_units_left_out_stay(picks: Any) -> None:
    """Other inputs may use units that this program leaves out."""
    assert freedom(symmetry(Picked(*picks), X)) == {}


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_tracing_a_recurrent_layer_warns_of_nothing(kind: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        symmetry(Recurrent(kind(7, 8), 8), X)
    assert not [str(warning.message) for warning in caught if "export" in str(warning.message)]
