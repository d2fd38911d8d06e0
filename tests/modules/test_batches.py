"""Batches: tensors, tuples, mappings and the pairs of data loaders are read in one way everywhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from merganser.analysis import landscape
from merganser.analysis.disentanglement import disentanglement
from merganser.errors import InputError
from merganser.library import Library
from merganser.modules.batches import drop_targets, fitting, forward, require_several, require_targets, reusable
from merganser.routing import AdaptiveModel, Oracle, score_layers, sweep_layers
from merganser.tuning import adamerge, greedy_soup
from merganser.tuning.fisher import diagonal_fisher
from merganser.tuning.gram import linear_grams
from merganser.tuning.validation import Validation

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


class Masked(nn.Module):
    def forward(self, x, mask=None):
        return x if mask is None else x * mask


class Two(nn.Module):
    def forward(self, x, ids):
        return x + ids[:, None]


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def loader():
    return DataLoader(TensorDataset(X, Y), batch_size=3)


@pytest.mark.parametrize("kind", [tuple, list])
def test_targets_are_told_from_arguments(kind):
    single, masked, two = mlp(), Masked(), Two()
    assert drop_targets(single, kind((X, Y))) is X
    assert drop_targets(single, kind((X, Y.float()))) is X  # regression
    assert drop_targets(masked, kind((X, Y))) is X  # classes, not a mask
    assert fitting(masked, kind((X, torch.ones(6, 4))))[0][1].shape == (6, 4)
    assert fitting(masked, kind((X, torch.ones(6, dtype=torch.bool))))[0][1].dtype == torch.bool
    assert len(fitting(two, kind((X, Y)))[0]) == 2  # it needs both
    assert fitting(two, kind(((X, Y), Y)))[0] == (X, Y)
    assert drop_targets(single, kind(({"input": X}, Y)))["input"] is X
    assert fitting(single, {"input": X})[1]["input"] is X
    assert drop_targets(single, X) is X


def test_wrong_inputs_are_named_with_their_shapes():
    with pytest.raises(InputError, match=r"Sequential does not accept a tensor of shape \[6, 5\]: mat1 and mat2"):
        forward(mlp(), torch.randn(6, 5))
    with pytest.raises(InputError, match="positional arguments"):
        forward(mlp(), (X, Y, Y))
    with pytest.raises(InputError, match="expected labelled batches"):
        require_targets(X)
    with pytest.raises(InputError, match="expected labelled batches"):
        require_targets((X, X, Y))
    for wrong in (X, {"x": X}, 3, "text"):
        with pytest.raises(InputError, match="a list of batches"):
            require_several(wrong)
    assert reusable(iter([X])) == [X]


def test_loaders_work_wherever_batches_are_asked_for(tmp_path):
    base, one, two = mlp(0), mlp(1), mlp(2)
    plain = [X[:3], X[3:]]
    assert torch.equal(linear_grams(base, loader()).tensors["0.weight"], linear_grams(base, plain).tensors["0.weight"])
    fisher = diagonal_fisher(base, loader()).tensors
    assert all(torch.equal(fisher[n], v) for n, v in diagonal_fisher(base, plain).tensors.items())
    assert diagonal_fisher(base, loader(), labels="given").samples == 6
    vectors = tuple({n: v - base.state_dict()[n] for n, v in m.state_dict().items()} for m in (one, two))
    found = disentanglement(base, base.state_dict(), vectors, (loader(), loader()), first=[0.5, 1.0])
    assert found == disentanglement(base, base.state_dict(), vectors, (plain, plain), first=[0.5, 1.0])
    options = {"steps": 2, "learning_rate": 0.1}
    merged, _ = adamerge([one, two], base, [loader(), loader()], **options)
    expected, _ = adamerge([one, two], base, [plain, plain], **options)
    assert all(torch.equal(merged[n], expected[n]) for n in expected)
    assert (
        greedy_soup([one, two], data=[loader(), loader()])[1] == greedy_soup([one, two], data=[list(loader())] * 2)[1]
    )
    assert 0 <= Validation(base, {"a": loader()})(base.state_dict(), 1) <= 1
    library = Library.build(base.state_dict(), {"a": one.state_dict(), "b": two.state_dict()}, tmp_path / "lib")
    model = AdaptiveModel(mlp(0), library, {t: {"weight": torch.randn(2, 3)} for t in "ab"})
    for batch in loader():
        torch.testing.assert_close(model(batch).scores, model(batch[0]).scores)
        assert model.route(batch).sets == model.route(batch[0]).sets
        oracle = Oracle(mlp(0), library, {t: {"weight": torch.randn(2, 3)} for t in "ab"})
        assert oracle.predict(batch, "a").classes.shape == (3,)
    assert len(sweep_layers(model, {"a": loader(), "b": loader()})) == len(score_layers(model.module, library))


def test_what_is_no_list_of_batches_is_named():
    one, two = mlp(1), mlp(2)
    for call in (linear_grams, diagonal_fisher):
        with pytest.raises(InputError, match=r"batches: expected a list of batches or a data loader, got a tensor"):
            call(one, X)
    with pytest.raises(InputError, match="data of 0: expected a list of batches"):
        greedy_soup([one, two], data=[X, X])
    with pytest.raises(InputError, match="data of 0: expected a list of batches"):
        adamerge([one, two], one, [X, X])
    with pytest.raises(InputError, match="does not accept a tensor of shape"):
        diagonal_fisher(one, [torch.randn(2, 7)])
    with pytest.raises(InputError, match="expected labelled batches"):
        diagonal_fisher(one, [X], labels="given")


def test_landscapes_take_modules_and_say_what_they_need():
    one, two = mlp(1), mlp(2)
    batches = list(loader())
    found = landscape.segment(mlp(), one, two, loader(), F.cross_entropy, points=3)
    assert found == landscape.segment(mlp(), one.state_dict(), two.state_dict(), batches, F.cross_entropy, points=3)
    assert found == landscape.segment(mlp(), one, two, iter(batches), F.cross_entropy, points=3)
    plane = landscape.plane(mlp(), [mlp(0), one, two], batches, F.cross_entropy, resolution=3)
    states = tuple(m.state_dict() for m in (mlp(0), one, two))
    assert plane == landscape.plane(mlp(), states, batches, F.cross_entropy, resolution=3)
    with pytest.raises(InputError, match="expected labelled batches"):
        landscape.segment(mlp(), one, two, [X], F.cross_entropy)
    with pytest.raises(InputError, match="a list of batches"):
        landscape.segment(mlp(), one, two, X, F.cross_entropy)
    with pytest.raises(InputError, match="model 1: expected a module or its state dict, got a str"):
        landscape.segment(mlp(), one, "two", batches, F.cross_entropy)
    with pytest.raises(InputError, match="three models"):
        landscape.plane(mlp(), [one, two], batches, F.cross_entropy)
    with pytest.raises(InputError, match="expected a state dict, got a Sequential"):
        diagonal_fisher(one, [X], weights=two)


@pytest.mark.parametrize("call", [lambda model, x: model(x), lambda model, x: model.route(x)])
def test_an_adaptive_model_names_inputs_of_a_wrong_width(tmp_path, call):
    base = mlp(0)
    library = Library.build(base.state_dict(), {"a": mlp(1).state_dict(), "b": mlp(2).state_dict()}, tmp_path / "lib")
    model = AdaptiveModel(mlp(0), library)
    with pytest.raises(InputError, match=r"does not accept a tensor of shape \[2, 9\]"):
        call(model, torch.randn(2, 9))
    assert call(model, X) is not None


def test_budgets_may_be_sizes(tmp_path):
    base = mlp(0).state_dict()
    experts = {"a": mlp(1).state_dict(), "b": mlp(2).state_dict()}
    library = Library.build(base, experts, tmp_path / "lib", budget="4.5kB")
    assert sum(library.size().experts.values()) <= 4500
    for wrong in ("much", [1], True):
        with pytest.raises(InputError):
            Library.build(base, experts, tmp_path / "other", budget=wrong)
    with pytest.raises(InputError, match="the energy must be a number"):
        Library.build(base, experts, tmp_path / "other", energy="0.9")


class Encoder(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh())

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
@pytest.mark.parametrize("labels", ["expected", "given"])
def test_fisher_of_an_encoder_goes_through_its_head(strategy, labels):
    encoder, head = Encoder(1), nn.Linear(8, 3)
    whole = nn.Sequential(encoder, head)
    found = diagonal_fisher(encoder, loader(), head=head, strategy=strategy, labels=labels).tensors
    expected = diagonal_fisher(whole, loader(), labels=labels).tensors
    assert set(found) == {"body.0.weight", "body.0.bias"}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[f"0.{name}"])
    assert all(p.requires_grad for p in head.parameters())
    features = diagonal_fisher(encoder, loader(), labels="expected").tensors
    assert not torch.allclose(features["body.0.weight"], found["body.0.weight"])
