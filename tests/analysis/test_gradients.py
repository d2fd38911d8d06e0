"""The expansion, the bounds and the descent condition."""

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from merganser.analysis import gradients as gr
from merganser.analysis.gradients.bounds import _ACTIVATIONS
from merganser.errors import InputError
from support.curvature import naive_curvature_term


def network(activation=nn.Tanh, sizes=(5, 7, 3), bias=True, seed=0, scale=None):
    torch.manual_seed(seed)
    layers = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(a, b, bias=bias)] + ([activation()] if i < len(sizes) - 2 else [])
    module = nn.Sequential(*layers).double()
    if scale is not None:
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(scale)
    return module


def tasks(count=3, n=16, width=5, classes=3, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {
        f"t{t}": (
            torch.randn(n, width, generator=g, dtype=torch.float64) + 0.7 * t,
            torch.randint(0, classes, (n,), generator=g),
        )
        for t in range(count)
    }


def losses(module=None, data=None, **kwargs):
    return gr.TaskLosses.of(module or network(), F.cross_entropy, data or tasks(), **kwargs)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(9, 2)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.conv(x[:, None]))).flatten(1))


@pytest.mark.parametrize("alpha", [0.2, 1 / 3, 1.0, 1.7])
@pytest.mark.parametrize("kind", ["mlp", "relu", "conv"])
def test_one_epoch_of_task_arithmetic_is_one_joint_step(alpha, kind):
    torch.manual_seed(3)
    module = {"mlp": network, "relu": lambda: network(nn.ReLU), "conv": lambda: Convolutional().double()}[kind]()
    data = tasks(classes=2 if kind == "conv" else 3)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    report = gr.gap(losses(module, data), eta=0.3, alpha=alpha, epochs=1)
    assert report.gap <= 1e-15 * max(1.0, report.travelled) * 10
    assert report.travelled > 1e-3
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert module.training


def test_single_task_with_alpha_one_never_parts():
    one = losses(data={"only": tasks()["t0"]})
    report = gr.gap(one, eta=0.2, alpha=1.0, epochs=6)
    assert report.gap < 1e-14
    assert report.curvature < 1e-14


@pytest.mark.parametrize("alpha", [0.3, 1 / 3, 1.0])
@pytest.mark.parametrize("epochs", [2, 4])
def test_orders_in_the_step_size(alpha, epochs):
    order = gr.observed_order(losses(), [0.01, 0.005, 0.0025, 0.00125], alpha=alpha, epochs=epochs)
    assert abs(order.gap_slope - 2) < 0.1
    assert abs(order.residual_slope - 3) < 0.1


def test_orders_hold_for_another_loss_and_architecture():
    torch.manual_seed(0)
    module = Convolutional().double()
    g = torch.Generator().manual_seed(5)
    data = {t: (torch.randn(12, 5, generator=g).double(), torch.randn(12, 2, generator=g).double()) for t in "ab"}
    order = gr.observed_order(
        gr.TaskLosses.of(module, F.mse_loss, data), [0.008, 0.004, 0.002, 0.001], alpha=0.5, epochs=3
    )
    assert abs(order.gap_slope - 2) < 0.1
    assert abs(order.residual_slope - 3) < 0.1


class Attention(nn.Module):
    """The fused attention call has no second derivative; the Hessian-vector product must get around it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        q, k, v = self.qkv(x.unflatten(1, (-1, 4))[:, None]).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


def test_orders_hold_through_attention():
    torch.manual_seed(0)
    subject = losses(Attention().double(), tasks(width=12))
    order = gr.observed_order(subject, [0.01, 0.005, 0.0025], alpha=1 / 3, epochs=3)
    assert abs(order.gap_slope - 2) < 0.1
    assert abs(order.residual_slope - 3) < 0.1


def test_curvature_term_against_finite_differences_of_the_gap():
    subject, alpha, epochs = losses(), 0.4, 3

    def gap_vector(eta):
        experts = [p[-1] for p in gr.expert_paths(subject, eta, epochs).values()]
        return gr.task_arithmetic(subject.start, experts, alpha) - gr.joint_path(subject, eta, alpha, epochs)[-1]

    h = 1e-3
    second = (gap_vector(h) - 2 * gap_vector(0.0) + gap_vector(-h)) / (2 * h**2)
    at_base = gr.curvature_term(subject, [subject.start] * (epochs + 1), alpha)
    torch.testing.assert_close(second, -alpha * at_base, rtol=1e-4, atol=1e-7)


def test_curvature_term_against_the_materialised_hessian():
    subject, alpha = losses(), 0.7
    joint = gr.joint_path(subject, 0.05, alpha, 4)
    expected = naive_curvature_term(subject, joint, alpha, hessians_at=joint[1:])
    torch.testing.assert_close(gr.curvature_term(subject, joint, alpha), expected, rtol=1e-10, atol=1e-12)


def test_an_order_is_fitted_to_gaps():
    subject = losses()
    order = gr.observed_order(subject, [0.02, 0.01], alpha=0.7, epochs=3)
    assert order.gaps == tuple(gr.gap(subject, eta=eta, alpha=0.7, epochs=3) for eta in (0.02, 0.01))


def test_at_alpha_one_over_t_the_gap_is_a_covariance():
    """C at θ0 is −T (k choose 2) Cov_t(H_t, g_t): not zero, although |αT − 1| is."""
    subject, epochs = losses(), 3
    theta, count = subject.start, len(subject.tasks)
    grads = {t: subject.gradient(t, theta) for t in subject.tasks}
    mean = sum(grads.values()) / count
    covariance = sum(subject.hvp(t, theta, grads[t] - mean) for t in subject.tasks) / count
    term = gr.curvature_term(subject, [theta] * (epochs + 1), 1 / count)
    torch.testing.assert_close(term, -count * math.comb(epochs, 2) * covariance, rtol=1e-9, atol=1e-12)
    assert term.norm() > 1e-3


def test_batches_are_weighted_by_their_size():
    whole = tasks(count=1, n=17)
    x, y = whole["t0"]
    split = {"t0": [(x[:3], y[:3]), (x[3:10], y[3:10]), (x[10:], y[10:])]}
    a, b = losses(data=whole), losses(data=split)
    assert a.value("t0", a.start) == pytest.approx(b.value("t0", b.start), rel=1e-12)
    torch.testing.assert_close(a.gradient("t0", a.start), b.gradient("t0", b.start))
    v = torch.randn(a.start.shape, dtype=torch.float64)
    torch.testing.assert_close(a.hvp("t0", a.start, v), b.hvp("t0", b.start, v))


def dense_hessian(subject, task, theta):
    return torch.stack([subject.hvp(task, theta, e) for e in torch.eye(theta.numel(), dtype=theta.dtype)])


def test_hessian_norm_is_the_spectral_norm():
    subject = losses()
    dense = dense_hessian(subject, "t1", subject.start)
    torch.testing.assert_close(dense, dense.T, rtol=1e-9, atol=1e-12)
    assert gr.hessian_norm(subject, "t1", subject.start) == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=1e-8
    )


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.ReLU, nn.Identity, nn.Softplus, nn.GELU])
@pytest.mark.parametrize(
    ("sizes", "bias", "scale"), [((5, 6, 3), False, 0.1), ((5, 4, 4, 3), True, 1.0), ((5, 6, 3), True, 3.0)]
)
def test_the_bound_holds(activation, sizes, bias, scale):
    subject = losses(network(activation, sizes, bias, scale=scale), tasks(count=2, n=6))
    check = gr.check_bound(subject, eta=0.01, alpha=0.5, epochs=3)
    assert check.holds
    assert check.measured_gradient <= check.bound.gradient
    assert check.measured_hessian <= check.bound.hessian


@given(
    scale=st.floats(0.05, 4),
    alpha=st.floats(-1, 2),
    seed=st.integers(0, 1000),
    activation=st.sampled_from([nn.Tanh, nn.Sigmoid, nn.ReLU]),
)
@settings(max_examples=15, deadline=None)
def test_the_bound_holds_anywhere(scale, alpha, seed, activation):
    subject = losses(network(activation, (5, 4, 3), seed=seed, scale=scale), tasks(count=2, n=4, seed=seed))
    assert gr.check_bound(subject, eta=0.02, alpha=alpha, epochs=2).holds


@pytest.mark.parametrize("kind", list(_ACTIVATIONS))
def test_activation_constants_cover_a_grid(kind):
    slope, curvature, at_zero = _ACTIVATIONS[kind]
    phi = kind()
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)[1::2]
    first = torch.func.vmap(torch.func.grad(phi))(z).abs().max()
    assert first <= slope * (1 + 1e-9)
    assert first >= slope * 0.999
    assert abs(float(phi(torch.zeros(1, dtype=torch.float64)))) == pytest.approx(at_zero, abs=1e-12)
    if kind not in (nn.ReLU, nn.Identity):
        second = torch.func.vmap(torch.func.grad(torch.func.grad(phi)))(z).abs().max()
        assert second <= curvature * (1 + 1e-9)
        assert second >= curvature * 0.999


steps = st.lists(st.tuples(st.integers(1, 1000), st.floats(-1, 1, allow_subnormal=False)), min_size=1, max_size=6)


@given(steps)
@settings(max_examples=300)
def test_the_descent_condition_is_sufficient(step):
    decreases = {str(i): d for i, (_, d) in enumerate(step)}
    check = gr.descent_check(decreases, {str(i): n for i, (n, _) in enumerate(step)})
    if check.atm_decrease > check.threshold + 1e-12:
        assert check.target_decrease > 0


def test_descent_edges():
    assert gr.descent_check({"a": 0.1}, {"a": 5}).guaranteed
    nothing = gr.descent_check({"a": 0.0, "b": -0.1}, {"a": 5, "b": 5})
    assert not nothing.guaranteed
    assert nothing.to_dict()["threshold"] is None
    with pytest.raises(InputError, match="sample counts"):
        gr.descent_check({"a": 0.1}, {"b": 1})


def test_results_are_json_and_mistakes_are_named():
    subject = losses()
    json.dumps(gr.observed_order(subject, [0.02, 0.01], alpha=0.5, epochs=2).to_dict(), allow_nan=False)
    json.dumps(gr.check_bound(subject, eta=0.01, alpha=0.5, epochs=2).to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="did you mean 't0'"):
        subject.gradient("t00", subject.start)
    with pytest.raises(InputError, match="epochs >= 2"):
        gr.observed_order(subject, [0.02, 0.01], alpha=0.5, epochs=1)
    with pytest.raises(InputError, match="Sequential"):
        gr.check_bound(losses(Convolutional().double(), tasks(classes=2)), eta=0.1, alpha=1, epochs=2)
    with pytest.raises(InputError, match="no task"):
        gr.TaskLosses.of(network(), F.cross_entropy, {})


@pytest.mark.parametrize("data", [torch.zeros(4, 5), [torch.zeros(4, 5)], [(torch.zeros(4, 5),)], 3])
def test_data_without_targets_is_named(data):
    with pytest.raises(InputError, match="data of task 't'"):
        gr.TaskLosses.of(network(), F.cross_entropy, {"t": data})


def test_constants_of_a_sharp_softplus():
    module = nn.Sequential(nn.Linear(3, 4), nn.Softplus(beta=20.0), nn.Linear(4, 2)).double()
    losses = gr.TaskLosses.of(module, F.cross_entropy, {"t": (torch.randn(5, 3).double(), torch.zeros(5).long())})
    found = gr.network_constants(losses, [losses.start])
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    value = module[1](x)
    curvature = torch.diff(value, 2) / (x[1] - x[0]) ** 2
    assert found.curvature == pytest.approx(float(curvature.max()), rel=1e-3)
    assert found.at_zero == pytest.approx(float(value[1000]))


def test_the_hessian_of_one_weight_and_of_a_plane():
    inputs, targets = torch.tensor([[2.0]]), torch.zeros(1, 1)
    module = nn.Sequential(nn.Linear(1, 1, bias=False))
    losses = gr.TaskLosses.of(module, F.mse_loss, {"t": (inputs, targets)})
    assert gr.hessian_norm(losses, "t", losses.start) == pytest.approx(8.0)
    plane = gr.TaskLosses.of(
        nn.Sequential(nn.Linear(2, 1)), lambda outputs, _: outputs.mean(), {"t": (torch.randn(4, 2), torch.zeros(4))}
    )
    assert gr.hessian_norm(plane, "t", plane.start) == 0.0


def test_a_bound_needs_an_epoch():
    module = nn.Sequential(nn.Linear(3, 2))
    losses = gr.TaskLosses.of(module, F.cross_entropy, {"t": (torch.randn(5, 3), torch.zeros(5).long())})
    with pytest.raises(InputError, match="at least 1, got 0"):
        gr.check_bound(losses, eta=0.1, alpha=0.5, epochs=0)
