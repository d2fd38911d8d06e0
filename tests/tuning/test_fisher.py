"""Diagonal Fisher: per-example squares, against a plain loop of autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.checkpoints import open as open_checkpoint
from merganser.errors import CheckpointError, InputError
from merganser.tuning.fisher import diagonal_fisher
from merganser.tuning.statistics import Statistics


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def per_example_squares(module, x, y):
    module.eval()
    module.zero_grad()
    F.nll_loss(module(x[None]).log_softmax(-1), y[None]).backward()
    return {n: p.grad.clone().square() for n, p in module.named_parameters()}


def looped(module, xs, ys):
    total = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for x, y in zip(xs, ys, strict=True):
        for n, square in per_example_squares(module, x, y).items():
            total[n] += square / len(xs)
    return total


@pytest.fixture
def data():
    g = torch.Generator().manual_seed(3)
    return torch.randn(11, 4, generator=g).double(), torch.randint(0, 3, (11,), generator=g)


@pytest.mark.parametrize("strategy", ["vmap", "loop", "auto"])
def test_given_labels_against_a_loop(data, strategy):
    x, y = data
    module = mlp()
    found = diagonal_fisher(module, [(x[:7], y[:7]), (x[7:], y[7:])], labels="given", strategy=strategy, chunk=4)
    assert found.samples == 11
    for name, expected in looped(mlp(), x, y).items():
        torch.testing.assert_close(found.tensors[name], expected, rtol=1e-9, atol=1e-14)
    assert all(p.grad is None for p in module.parameters())
    assert module.training


def test_it_is_not_the_square_of_the_batch_gradient(data):
    x, y = data
    module = mlp().eval()
    F.cross_entropy(module(x), y).backward()
    found = diagonal_fisher(mlp(), [(x, y)], labels="given").tensors
    wrong = {n: p.grad.square() for n, p in module.named_parameters()}
    assert all(found[n].sum() > 1.5 * wrong[n].sum() for n in wrong)


def test_expected_labels_sum_over_classes(data):
    x, _ = data
    found = diagonal_fisher(mlp(), [x]).tensors
    module = mlp().eval()
    total = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for row in x:
        p = module(row[None]).softmax(-1)[0].detach()
        for c in range(3):
            for n, square in per_example_squares(module, row, torch.tensor(c)).items():
                total[n] += p[c] * square / len(x)
    for name, expected in total.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-14)


def test_sampled_labels_approach_the_expectation_and_are_seeded(data):
    x, _ = data
    many = [x] * 150
    expected = diagonal_fisher(mlp(), [x]).tensors
    sampled = diagonal_fisher(mlp(), many, labels="sampled", chunk=64, seed=1).tensors
    again = diagonal_fisher(mlp(), many, labels="sampled", chunk=64, seed=1).tensors
    for name in expected:
        assert torch.equal(sampled[name], again[name])
        torch.testing.assert_close(sampled[name].sum(), expected[name].sum(), rtol=0.1, atol=0)


class DataDependent(nn.Module):
    """Branches on a value, which vmap cannot."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3).double()

    def forward(self, x):
        return self.a(x) if float(x.sum()) > 0 else -self.a(x)


def test_falls_back_to_the_loop_where_vmap_cannot(data):
    x, y = data
    module = DataDependent()
    auto = diagonal_fisher(module, [(x, y)], labels="given").tensors
    loop = diagonal_fisher(module, [(x, y)], labels="given", strategy="loop").tensors
    assert all(torch.equal(auto[n], loop[n]) for n in loop)
    with pytest.raises(RuntimeError):
        diagonal_fisher(module, [(x, y)], labels="given", strategy="vmap")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, tokens, mask):
        return self.head(self.embed(tokens) * mask[..., None])


def test_sequences_and_keyword_inputs():
    torch.manual_seed(0)
    module = Tagger()
    batch = {"tokens": torch.randint(0, 7, (3, 5)), "mask": torch.ones(3, 5)}
    y = torch.randint(0, 7, (3, 5))
    found = diagonal_fisher(module, [(batch, y)], labels="given").tensors
    total = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for i in range(3):
        module.zero_grad()
        z = module(batch["tokens"][i : i + 1], batch["mask"][i : i + 1]).log_softmax(-1)
        F.nll_loss(z[0], y[i], reduction="sum").backward()
        for n, p in module.named_parameters():
            total[n] += p.grad.square() / 3
    for n in total:
        torch.testing.assert_close(found[n], total[n])
    assert diagonal_fisher(module, [batch], labels="sampled").samples == 3
    with pytest.raises(InputError, match="sampled"):
        diagonal_fisher(module, [batch])


def test_frozen_parameters_other_weights_and_mistakes(data):
    x, y = data
    module = mlp()
    module[0].requires_grad_(False)
    other = mlp(9).state_dict()
    found = diagonal_fisher(module, [(x, y)], weights=other, labels="given").tensors
    assert set(found) == {"3.weight", "3.bias"}
    torch.testing.assert_close(found["3.weight"], looped(mlp(9), x, y)["3.weight"])
    with pytest.raises(InputError, match="no batches"):
        diagonal_fisher(module, [])
    with pytest.raises(InputError, match="unknown labels"):
        diagonal_fisher(module, [x], labels="true")
    with pytest.raises(InputError, match="targets of shape"):
        diagonal_fisher(module, [(x, y[:3])], labels="given")


def test_saved_and_reused_without_the_data(data, tmp_path):
    x, _ = data
    one = diagonal_fisher(mlp(), [x[:4]])
    path = one.save(tmp_path / "fisher.safetensors")
    back = Statistics.load(path, "fisher")
    assert back.samples == 4
    assert all(torch.equal(back.tensors[n], v) for n, v in one.tensors.items())
    assert set(open_checkpoint(path).names()) == set(one.tensors)
    with pytest.raises(CheckpointError, match="expected 'gram'"):
        Statistics.load(path, "gram")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Statistics.load(tmp_path / "absent.safetensors")
