"""Where the printed statements about task vectors as gradients fail, and those of the library do not."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.printed_statements import printed_bound, printed_curvature_term, printed_threshold, remainder, slope
from benchmarks.theory import ETAS, small_losses
from merganser.analysis import gradients as gr
from support.curvature import naive_curvature_term


def losses():
    return small_losses(nn.Tanh, bias=True)


@pytest.mark.parametrize("alpha", [0.3, 1 / 3, 1.0])
@pytest.mark.parametrize("epochs", [2, 4])
@pytest.mark.parametrize("printed_term", [True, False])
def test_the_printed_sign_leaves_a_second_order_remainder(alpha, epochs, printed_term):
    def remainders(factor):
        way = {"alpha": alpha, "epochs": epochs, "factor": factor, "printed_term": printed_term}
        return [remainder(losses(), eta=eta, **way) for eta in ETAS]

    gaps, printed, right = map(remainders, (0, 1, -alpha))
    assert abs(slope(ETAS, gaps) - 2) < 0.1
    assert abs(slope(ETAS, right) - 3) < 0.1
    assert abs(slope(ETAS, printed) - 2) < 0.1
    assert all(left > gap for left, gap in zip(printed, gaps, strict=True)), "it even points the wrong way"


def test_the_library_has_the_right_sign_and_point():
    way = {"eta": 0.05, "alpha": 0.7, "epochs": 3}
    gap = gr.gap(losses(), **way)
    assert gap.residual == pytest.approx(remainder(losses(), **way, factor=-0.7), rel=1e-9)
    assert gap.residual != pytest.approx(remainder(losses(), **way, factor=-0.7, printed_term=True), rel=1e-3)
    assert gap.gap == pytest.approx(remainder(losses(), **way, factor=0), rel=1e-9)


def test_the_printed_term_against_the_materialised_hessian():
    subject, alpha = losses(), 0.7
    joint = gr.joint_path(subject, 0.05, alpha, 4)
    expected = naive_curvature_term(subject, joint, alpha, hessians_at=joint)
    torch.testing.assert_close(printed_curvature_term(subject, joint, alpha), expected, rtol=1e-10, atol=1e-12)


def test_the_taylor_term_of_a_step_is_at_the_point_of_that_step():
    """Experts that part by ε: the library's point leaves O(ε²) of the difference of gradients, the printed one O(ε)."""

    def left_over(epsilon, back):
        subject, eta, alpha, step = small_losses(nn.Tanh, bias=True, tasks=1), 0.1, 0.5, 3
        ((points, labels),) = subject.data["t0"]
        data = {"a": (points, labels), "b": (points + epsilon, labels)}
        subject = gr.TaskLosses.of(subject.module, subject.loss, data)
        joint = gr.joint_path(subject, eta, alpha, step)
        theta = gr.expert_paths(subject, eta, step)["a"][step]
        apart = theta - joint[step]
        difference = subject.gradient("a", theta) - subject.gradient("a", joint[step])
        return float((difference - subject.hvp("a", joint[step - back], apart)).norm())

    slopes = [math.log2(left_over(1e-2, back) / left_over(5e-3, back)) for back in (0, 1)]
    assert slopes == pytest.approx([2, 1], abs=0.1)


def checked(activation, *, alpha, epochs, scale=1.0, statement="general"):
    """Return the check of the library's bound on a small network without biases, and the printed bound."""
    subject = small_losses(activation, bias=False, scale=scale)
    check = gr.check_bound(subject, eta=0.01, alpha=alpha, epochs=epochs)
    assert check.holds
    tasks = len(subject.tasks)
    return check, printed_bound(check.constants, tasks=tasks, alpha=alpha, epochs=epochs, statement=statement)


def test_the_bound_vanishes_at_alpha_one_over_t_while_c_does_not():
    check, printed = checked(nn.Tanh, alpha=1 / 3, epochs=3)
    assert printed.total == pytest.approx(0, abs=1e-12)
    assert check.measured > 1e-3


def test_the_hessian_bound_misses_the_gauss_newton_term():
    """γ = 0 (a linear network) makes the general H_max zero; the Hessian of the loss is not."""
    check, printed = checked(nn.Identity, alpha=1.0, epochs=2)
    assert printed.hessian == 0
    assert check.measured_hessian > 0.1


def test_the_relu_hessian_bound_misses_the_cross_layer_derivatives():
    """A ReLU network is piecewise multilinear in its weights, not piecewise linear: ∂²f/∂W₁∂W₂ ≠ 0."""
    check, printed = checked(nn.ReLU, alpha=1.0, epochs=2, scale=0.1, statement="relu_appendix")
    assert check.measured_hessian > printed.hessian
    assert check.measured > printed.total


def test_the_gradient_bound_fails_for_small_weights():
    """∂f/∂W_ℓ has Π/s_ℓ where the printed Jacobian has Π, and there are L such blocks."""
    check, printed = checked(nn.Tanh, alpha=1.0, epochs=2, scale=0.03)
    assert check.measured_gradient > printed.gradient


@given(st.floats(-2, 3), st.integers(1, 20))
def test_task_factors_agree_outside_the_unit_interval_only(alpha, count):
    constants = gr.NetworkConstants(spectral_norms=(1.0,), input_norm=1.0, slope=1.0, curvature=1.0)
    printed, right = (
        f(constants, tasks=count, alpha=alpha, epochs=2).task_factor for f in (printed_bound, gr.curvature_bound)
    )
    assert printed <= right + 1e-9
    if count == 1 or not 0 < alpha < 1:
        assert printed == pytest.approx(right)
    elif 0.01 < alpha < 0.99:
        assert printed < right


def test_the_relu_statements_disagree():
    constants = gr.NetworkConstants(spectral_norms=(2.0, 1.5), input_norm=3.0, slope=1.0, curvature=0.0)
    text = printed_bound(constants, tasks=3, alpha=1.0, epochs=3, statement="relu_text").total
    appendix = printed_bound(constants, tasks=3, alpha=1.0, epochs=3, statement="relu_appendix").total
    assert appendix == pytest.approx(3 * 3 * 2 * 0.5 * math.sqrt(2) * 9.0**3)
    assert text == pytest.approx(appendix / 2 * math.sqrt(2) * 9.0)


def test_the_descent_condition_is_not_sufficient():
    decreases, samples = {"large": 0.001, "small": 1.0, "medium": -0.5}, {"large": 100, "small": 1, "medium": 50}
    check = gr.descent_check(decreases, samples)
    assert printed_threshold(decreases, samples) == pytest.approx(1 / 12)
    assert check.atm_decrease > printed_threshold(decreases, samples)
    assert check.target_decrease < 0
    assert not check.guaranteed


def test_the_descent_condition_fails_often_at_random():
    rng = np.random.default_rng(0)
    failures = 0
    for _ in range(2000):
        step = {str(i): float(d) for i, d in enumerate(rng.normal(size=3))}
        samples = {str(i): int(n) for i, n in enumerate(rng.integers(1, 1000, 3))}
        check = gr.descent_check(step, samples)
        failures += check.atm_decrease > printed_threshold(step, samples) and check.target_decrease <= 0
        assert check.target_decrease > 0 or not check.guaranteed
    assert failures > 20


def test_thresholds_where_all_losses_move_one_way():
    samples = {"a": 5, "b": 7}
    for step in ({"a": 0.1, "b": 0.2}, {"a": -0.1, "b": 0.0}):
        assert printed_threshold(step, samples) == gr.descent_check(step, samples).threshold
