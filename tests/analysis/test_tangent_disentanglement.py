"""The tangent model and weight disentanglement."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.analysis.disentanglement import disentanglement
from merganser.analysis.tangent import TangentModel, tangent
from merganser.errors import InputError


def mlp(seed=0, activation=nn.Tanh):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3)).double()


def vector(module, seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return {k: scale * torch.randn(v.shape, generator=g, dtype=v.dtype) for k, v in module.state_dict().items()}


class Attention(nn.Module):
    """Attention through the fused call, batch normalisation, tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.norm(mixed.mean(1)))


@pytest.mark.parametrize("make", [mlp, lambda: Attention().double()])
def test_tangent_is_the_derivative(make):
    torch.manual_seed(1)
    module = make().eval()
    x = torch.randint(0, 11, (5, 7)) if isinstance(module, Attention) else torch.randn(5, 4).double()
    base = {k: v.clone() for k, v in module.state_dict().items()}
    direction = {n: torch.randn_like(p) for n, p in module.named_parameters()}
    value, derivative = tangent(module, base, direction, x)
    h = 1e-5

    def at(t):
        moved = {n: base[n] + t * d for n, d in direction.items()}
        return torch.func.functional_call(module, moved, (x,))

    torch.testing.assert_close(value, at(0.0))
    torch.testing.assert_close(derivative, (at(h) - at(-h)) / (2 * h), rtol=1e-6, atol=1e-8)


def test_tangent_model_trains_its_displacement_only():
    module = mlp()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    model = TangentModel(module)
    x, y = torch.randn(32, 4).double(), torch.randint(0, 3, (32,))
    torch.testing.assert_close(model(x), module(x))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    first = F.cross_entropy(model(x), y)
    for _ in range(20):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    assert F.cross_entropy(model(x), y) < first
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    tau = model.task_vector()
    value, derivative = tangent(module, before, tau, x)
    torch.testing.assert_close(model(x), value + derivative)
    double = TangentModel(module).load_task_vector({k: 2 * v for k, v in tau.items()})
    torch.testing.assert_close(double(x) - module(x), 2 * (model(x) - module(x)))
    with pytest.raises(InputError, match="not a tensor of the module"):
        double.load_task_vector({"0.weigth": torch.zeros(1)})


def test_first_tangent_gradient_is_the_first_gradient():
    module = mlp()
    x, y = torch.randn(16, 4).double(), torch.randint(0, 3, (16,))
    F.cross_entropy(module(x), y).backward()
    model = TangentModel(module)
    F.cross_entropy(model(x), y).backward()
    for (_, p), d in zip(module.named_parameters(), model.displacement, strict=True):
        torch.testing.assert_close(d.grad, p.grad)


def naive_error(module, base, vectors, batches, alpha, beta):
    def f(a, b, x):
        weights = {k: base[k] + a * vectors[0][k] + b * vectors[1][k] for k in base}
        return torch.func.functional_call(module, weights, (x,)).argmax(-1)

    total = 0.0
    for t, xs in enumerate(batches):
        x = torch.cat(xs)
        alone = f(alpha, 0, x) if t == 0 else f(0, beta, x)
        total += float((alone != f(alpha, beta, x)).double().mean())
    return total


def test_disentanglement_against_its_definition():
    module = mlp()
    base = module.state_dict()
    vectors = (vector(module, 1, 0.5), vector(module, 2, 0.5))
    batches = tuple([torch.randn(n, 4).double() for n in (5, 9)] for _ in range(2))
    grid = [-1.0, 0.0, 0.7]
    report = disentanglement(module, base, vectors, batches, first=grid, second=[0.0, 1.0])
    for i, alpha in enumerate(grid):
        for j, beta in enumerate([0.0, 1.0]):
            expected = naive_error(module, base, vectors, batches, alpha, beta)
            assert report.error[i][j] == pytest.approx(expected, abs=1e-12)
    assert report.error[1][0] == 0
    assert report.mean > 0
    json.dumps(report.to_dict(), allow_nan=False)


def test_disentangled_by_construction():
    """Vectors that live on different input features, with task inputs to match, do not disturb each other."""
    module = nn.Linear(4, 3, bias=False).double()
    tau1, tau2 = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    tau1[:, 2:] = 0
    tau2[:, :2] = 0
    x1, x2 = torch.randn(20, 4).double(), torch.randn(20, 4).double()
    x1[:, 2:] = 0
    x2[:, :2] = 0
    args = (module, module.state_dict(), ({"weight": tau1}, {"weight": tau2}), ([x1], [x2]))
    for linearised in (False, True):
        report = disentanglement(*args, first=[0.5, 2.0], distance="euclidean", linearised=linearised)
        assert max(map(max, report.error)) < 1e-12


def test_linearised_grid_equals_tangent_models():
    module = mlp()
    base = module.state_dict()
    vectors = (vector(module, 1), vector(module, 2))
    x = torch.randn(11, 4).double()
    report = disentanglement(
        module, base, vectors, ([x], [x]), first=[0.3], second=[0.8], distance="euclidean", linearised=True
    )
    both = TangentModel(module).load_task_vector({k: 0.3 * vectors[0][k] + 0.8 * vectors[1][k] for k in base})
    one = TangentModel(module).load_task_vector({k: 0.3 * vectors[0][k] for k in base})
    two = TangentModel(module).load_task_vector({k: 0.8 * vectors[1][k] for k in base})
    with torch.no_grad():
        expected = sum(float((m(x) - both(x)).norm(dim=1).mean()) for m in (one, two))
    assert report.error[0][0] == pytest.approx(expected, rel=1e-10)


def test_heads_and_missing_inputs():
    module = mlp()
    vectors = (vector(module, 1), vector(module, 2))
    x = torch.randn(5, 4).double()
    flat = disentanglement(
        module, module.state_dict(), vectors, ([x], [x]), first=[1.0], heads=(lambda z: 0 * z, lambda z: 0 * z)
    )
    assert flat.error[0][0] == 0
    with pytest.raises(InputError, match="task 1"):
        disentanglement(module, module.state_dict(), vectors, ([x], []), first=[1.0])


def test_a_grid_without_scales_is_refused():
    module = nn.Sequential(nn.Linear(3, 2))
    state, x = module.state_dict(), torch.randn(4, 3)
    with pytest.raises(InputError, match="at least one scale"):
        disentanglement(module, state, (state, state), ([x], [x]), first=[])
