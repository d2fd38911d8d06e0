"""Clients aligned and averaged, without Flower; the strategy on a fake of its records, and on the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from merganser.align import scramble, symmetry
from merganser.errors import InputError, MissingExtraError
from merganser.federated import aggregate, align_clients, aligned


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))


@pytest.fixture(scope="module")
def free():
    return symmetry(network(0), torch.zeros(2, 5))


def state(seed):
    return {name: tensor.clone() for name, tensor in network(seed).state_dict().items()}


@pytest.mark.parametrize("method", ["universe", "reference"])
def test_scrambled_clients_come_back_to_the_reference(free, method):
    origin = state(0)
    clients = [scramble(origin, free, seed=seed) for seed in (1, 2, 3)]
    for client in align_clients(clients, free, origin, method=method):
        for name, tensor in client.items():
            assert torch.equal(tensor, origin[name])


@pytest.mark.parametrize("method", ["universe", "reference"])
def test_without_a_reference_the_first_client_keeps_its_place(free, method):
    clients = [state(1), scramble(state(1), free, seed=4)]
    moved = align_clients(clients, free, method=method)
    for name, tensor in clients[0].items():
        assert torch.equal(moved[0][name], tensor)
        assert torch.equal(moved[1][name], tensor)


def test_every_client_computes_what_it_did(free):
    clients = [state(seed) for seed in (1, 2, 3)]
    x = torch.randn(6, 5)
    for client, moved in zip(clients, align_clients(clients, free, state(0)), strict=True):
        before, after = network(0), network(0)
        before.load_state_dict(client)
        after.load_state_dict(moved)
        torch.testing.assert_close(before(x), after(x))


def test_the_average_is_weighted_by_examples(free):
    clients = [state(0), {name: tensor + 1e-3 for name, tensor in state(0).items()}]
    found = aggregate([clients[0], scramble(clients[1], free, seed=5)], [300, 100], free, state(0))
    for name in found:
        expected = (300 * clients[0][name].double() + 100 * clients[1][name].double()) / 400
        np.testing.assert_allclose(found[name].double().numpy(), expected.numpy(), rtol=0, atol=1e-6)


def test_one_client_alone_is_the_average(free):
    for name, tensor in aggregate([state(3)], [17], free).items():
        assert torch.equal(tensor, state(3)[name])


def test_mistakes_are_named(free):
    with pytest.raises(InputError, match="did you mean 'universe'"):
        align_clients([state(0), state(1)], free, method="univers")
    with pytest.raises(InputError, match="no client"):
        aggregate([], [], free)
    with pytest.raises(InputError, match="differ in"):
        aggregate([{"0": torch.zeros(3)}, {"0": torch.zeros(3)}], [1, 1], free)


class Record(dict):
    """A fake of Flower's ArrayRecord."""

    def to_torch_state_dict(self):
        return dict(self)


class Content(dict):
    @property
    def array_records(self):
        return {key: value for key, value in self.items() if isinstance(value, Record)}


def reply(arrays=None):
    content = None if arrays is None else Content(arrays=Record(arrays), metrics={"num-examples": 1})
    return SimpleNamespace(content=content, has_error=lambda: arrays is None)


class Averaging:
    """A fake strategy: remembers what it was asked and averages what it is given."""

    def configure_train(self, server_round, arrays, config, grid):
        return ["to", "every", "node"]

    def aggregate_train(self, server_round, replies):
        self.replies = replies
        good = [r.content["arrays"] for r in replies if not r.has_error()]
        return {name: sum(each[name] for each in good) / len(good) for name in good[0]}, {"loss": 1.0}

    def configure_evaluate(self, server_round, arrays, config, grid):
        return ["evaluate"]

    def aggregate_evaluate(self, server_round, replies):
        return {"accuracy": 0.5}

    def summary(self):
        self.summarised = True


@pytest.fixture
def flower(monkeypatch):
    """Flower as far as the strategy needs it, whether it is installed or not."""
    names = ("flwr", "flwr.serverapp", "flwr.serverapp.strategy")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flwr.serverapp.strategy"].Strategy = type("Strategy", (), {"start": lambda self: "started"})


def test_the_wrapped_strategy_gets_aligned_clients_and_does_the_rest(flower, free):
    inner = Averaging()
    strategy = aligned(inner, free)
    assert strategy.start() == "started"
    origin = state(0)
    assert strategy.configure_train(1, Record(origin), {}, None) == ["to", "every", "node"]
    replies = [reply(scramble(origin, free, seed=1)), reply(), reply(scramble(origin, free, seed=2))]
    arrays, metrics = strategy.aggregate_train(1, iter(replies))
    assert metrics == {"loss": 1.0}
    assert len(inner.replies) == 3
    for name, tensor in origin.items():
        torch.testing.assert_close(arrays[name], tensor)
    assert strategy.configure_evaluate(1, Record(origin), {}, None) == ["evaluate"]
    assert strategy.aggregate_evaluate(1, []) == {"accuracy": 0.5}
    strategy.summary()
    assert inner.summarised


def test_without_flower_the_extra_is_named(monkeypatch, free):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "flwr.serverapp.strategy", raising=False)
    monkeypatch.delitem(sys.modules, "flwr.serverapp", raising=False)
    with pytest.raises(MissingExtraError, match=r"merganser\[federated\]"):
        aligned(Averaging(), free)


def test_with_flowers_own_records_and_fedavg(free):
    app = pytest.importorskip("flwr.app")
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    origin = state(0)
    strategy = aligned(strategies.FedAvg(), free)
    assert isinstance(strategy, strategies.Strategy)
    strategy._reference = app.ArrayRecord(origin)
    replies = []
    for seed in (1, 2):
        arrays = app.ArrayRecord(scramble(origin, free, seed=seed))
        metrics = app.MetricRecord({"num-examples": seed, "loss": 0.5})
        content = app.RecordDict({"arrays": arrays, "metrics": metrics})
        replies.append(SimpleNamespace(content=content, has_error=lambda: False))  # messages exist only in a run
    found, metrics = strategy.aggregate_train(1, replies)
    for name, tensor in found.to_torch_state_dict().items():
        torch.testing.assert_close(tensor, origin[name])
    assert metrics["loss"] == 0.5
