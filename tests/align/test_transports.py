"""A fine-tune that travels: masks by gradients, scales by scores, heads by spectra."""

import copy

import numpy as np
import pytest
import torch
from align_networks import attention, mlp, noisy_copies, trained_like
from torch import nn

from merganser.align import match, scramble, symmetry, transport
from merganser.align.head_spectra import match_heads
from merganser.align.permutations import apply, identity, inverse
from merganser.align.solver import layout_and_weights
from merganser.align.transported import MovedVector, Transported, transport_checkpoint
from merganser.align.transports import match_bases
from merganser.checkpoints import open as open_checkpoint
from merganser.checkpoints.vectors import Difference
from merganser.errors import InputError


def tuned_from(state, seed=1, size=0.05):
    generator = torch.Generator().manual_seed(seed)
    return {n: t + size * torch.randn(t.shape, generator=generator) for n, t in state.items()}


def streamed(tuned, source, target, free, permutations, scale):
    opened = [open_checkpoint(model) for model in (tuned, source, target)]
    return Transported(opened[2], MovedVector(Difference(*opened[:2]), free, permutations), scale)


@pytest.fixture
def travellers():
    module, free = mlp(6, 9, 7, 3)
    source = trained_like(module, 0)
    [target], [planted] = noisy_copies(source, free, 1, noise=0.0, seed=3)
    return module, free, tuned_from(source), source, target, planted


def test_the_view_has_what_the_function_returns(travellers):
    _, free, tuned, source, target, planted = travellers
    expected = transport(tuned, source, target, free, scale=0.7, alignment=planted)
    view = streamed(tuned, source, target, free, planted, 0.7)
    assert set(view) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(view[name], tensor)
        torch.testing.assert_close(view.read(name, (1, 3)), tensor[1:3])
    other = streamed(tuned, source, target, free, inverse(free, planted), 0.7)
    assert other.fingerprint() != view.fingerprint()


def test_checkpoints_travel_with_and_without_matching(travellers):
    _, free, tuned, source, target, planted = travellers
    opened = [open_checkpoint(model) for model in (tuned, source, target)]
    moved = transport_checkpoint(*opened, free, scale=0.7)
    assert isinstance(moved.checkpoint, Transported)
    assert moved.cosine[0] < moved.cosine[1] == pytest.approx(1)
    expected = transport(tuned, source, target, free, scale=0.7, alignment=planted)
    for name, tensor in expected.items():
        torch.testing.assert_close(moved.checkpoint[name], tensor)
    chosen = transport_checkpoint(
        *opened, free, scale=[0.2, 0.7], score=lambda w: -float((w["0.weight"] - expected["0.weight"]).norm())
    )
    assert (chosen.scale, list(chosen.scores)) == (0.7, [0.2, 0.7])
    torch.testing.assert_close(chosen.checkpoint["0.weight"], expected["0.weight"])
    still = transport_checkpoint(*opened, None)
    assert still.cosine is None
    torch.testing.assert_close(
        still.checkpoint["0.weight"], target["0.weight"] + tuned["0.weight"] - source["0.weight"]
    )


def test_orthogonal_maps_carry_a_fine_tune_to_a_rotated_base():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.up = nn.Linear(8, 12), nn.RMSNorm(12), nn.Linear(12, 20)
            self.down, self.last, self.head = nn.Linear(20, 12), nn.RMSNorm(12), nn.Linear(12, 5)

        def forward(self, x):
            x = self.embed(x)
            return self.head(self.last(x + self.down(self.up(self.norm(x)).relu())))

    torch.manual_seed(0)
    old, x = Block().double(), torch.randn(16, 8, dtype=torch.float64)
    turned = symmetry(old, x[:2], kind="orthogonal")
    new = scramble(old, turned, seed=4)
    tuned = copy.deepcopy(old)
    tuned.load_state_dict(tuned_from(old.state_dict(), size=0.02))
    moved = copy.deepcopy(old)
    moved.load_state_dict(transport(tuned, old, new, turned))
    assert (old(x) - tuned(x)).abs().max() > 0.05
    torch.testing.assert_close(moved(x), tuned(x), atol=2e-3, rtol=1e-3)


def test_the_mask_keeps_what_descends(travellers):
    module, free, tuned, source, target, planted = travellers
    module.load_state_dict(target)
    x, y = torch.randn(20, 6, generator=torch.Generator().manual_seed(2)), torch.arange(20) % 3
    plain = transport(tuned, source, module, free, alignment=planted)
    masked = transport(tuned, source, module, free, alignment=planted, gradient_batches=[(x[:10], y[:10]), (x, y)])
    naive = copy.deepcopy(module)
    (nn.functional.cross_entropy(naive(x[:10]), y[:10]) + nn.functional.cross_entropy(naive(x), y)).backward()
    for name, parameter in naive.named_parameters():
        step = plain[name] - target[name]
        expected = target[name] + torch.where(step * parameter.grad < 0, step, 0.0)
        torch.testing.assert_close(masked[name], expected)
    assert all(p.grad is None for p in module.parameters())


def test_the_scale_with_the_best_score_is_taken(travellers):
    _, free, tuned, source, target, planted = travellers
    wanted = transport(tuned, source, target, free, alignment=planted, scale=0.4)

    def close(state):
        return -float(sum((state[n] - t).square().sum() for n, t in wanted.items()))

    found = transport(tuned, source, target, free, alignment=planted, scale=[0.2, 0.4, 1.0], score=close)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


def test_scores_that_are_not_numbers_rank_last_and_are_refused_alone(travellers):
    _, free, tuned, source, target, planted = travellers
    some = iter([float("nan"), 1.0])
    found = transport(tuned, source, target, free, alignment=planted, scale=[0.1, 0.5], score=lambda state: next(some))
    half = transport(tuned, source, target, free, alignment=planted, scale=0.5)
    torch.testing.assert_close(found["0.weight"], half["0.weight"])
    with pytest.raises(InputError, match="not a number at any scale"):
        transport(tuned, source, target, free, alignment=planted, score=lambda state: float("nan"))


def test_a_match_that_is_learned_takes_the_loss_of_the_transport(travellers):
    """`loss` is one option of the transport, also where the match needs it."""
    module, free, tuned, source, target, planted = travellers
    module.load_state_dict(source)
    batches = [(torch.randn(8, 6), torch.randn(8, 3))]
    options = {"method": "ste", "batches": batches, "loss": nn.functional.mse_loss}
    moved = transport(tuned, module, target, free, **options)
    expected = transport(tuned, source, target, free, alignment=planted)
    assert all(torch.allclose(moved[name], tensor, atol=1e-5) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": [0.1, 0.2]}, "2 scales .* need a score"),
        ({"scale": "big"}, "scale is a finite number"),
        ({"scale": []}, "scale is a finite number"),
        ({"scale": float("nan")}, "scale is a finite number"),
        ({"gradient_batches": [(torch.ones(2, 6), torch.ones(2))]}, "give a module"),
    ],
)
def test_wrong_options_of_transport(travellers, options, message):
    _, free, tuned, source, target, _ = travellers
    with pytest.raises(InputError, match=message):
        transport(tuned, source, target, free, **options)


def test_empty_gradient_batches(travellers):
    module, free, tuned, source, _, planted = travellers
    with pytest.raises(InputError, match="gradient_batches are empty"):
        transport(tuned, source, module, free, alignment=planted, gradient_batches=iter(()))


def test_heads_are_told_apart_by_their_spectra():
    """Also where the stream is in another order, and against a naive loop over heads."""
    module, free = attention(24, 6)
    state = trained_like(module, 1)
    [other], [planted] = noisy_copies(state, free, 1, noise=0.02, seed=5)
    layout, weights = layout_and_weights(free, [state, other])
    found = match_heads(layout, "head", weights)
    np.testing.assert_array_equal(found, np.argsort(planted["head"]))

    def naive(s, h):
        rows = s["qkv.weight"].reshape(3, 6, 4, 24)[:, h]
        qk = torch.cat([rows[0], rows[1]], dim=1)  # the units of queries and keys are one axis
        return [torch.linalg.svdvals(a) for a in (qk, rows[2], s["out.weight"].reshape(24, 6, 4)[:, h])]

    for h in range(6):
        gaps = [
            sum(float((a - b).square().sum()) for a, b in zip(naive(state, h), naive(other, g), strict=True))
            for g in range(6)
        ]
        assert int(np.argmin(gaps)) == found[h]


def test_heads_are_also_matched_by_spectra_unless_a_start_is_given():
    module, free = attention(24, 6)
    state, other = trained_like(module, 1), trained_like(module, 2)
    plain = match(state, other, free)
    by_heads = match(state, other, free, start="spectra", tries=1)
    assert match_bases(state, other, free).objective == max(plain.objective, by_heads.objective)
    assert match_bases(state, other, free, start="propagate").objective == plain.objective


def test_a_match_from_spectra_finds_what_was_planted():
    module, free = attention(24, 6)
    state = trained_like(module, 1)
    [other], _ = noisy_copies(state, free, 1, noise=0.0, seed=5)
    found = match(state, other, free, start="spectra", tries=1)
    back = apply(free, found.permutations, other)
    assert found.tries[0].start == "spectra"
    for name in free.objective:
        torch.testing.assert_close(back[name], state[name])


def test_a_variance_that_would_be_negative_stays_that_of_the_target():
    """A network with a negative variance returns NaN."""

    def network(seed, variance):
        made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
        made.load_state_dict(trained_like(made, seed))
        made[1].running_var.copy_(torch.tensor(variance))
        return made

    target, tuned = network(0, [1.0, 2.0, 3.0, 4.0]), network(1, [1.0, 1.0, 6.0, 6.0])
    source, x = network(2, [5.0, 2.0, 5.0, 5.0]), torch.randn(6, 3)
    free = symmetry(target, x)
    still = identity(free)
    expected = torch.tensor([1.0, 1.0, 4.0, 5.0])
    moved = transport(tuned, source, target, free, alignment=still)
    torch.testing.assert_close(moved["1.running_var"], expected)
    view = streamed(*(m.state_dict() for m in (tuned, source, target)), free, still, 1.0)
    torch.testing.assert_close(view["1.running_var"], expected)
    scores = []

    def score(weights):
        target.load_state_dict(weights)
        scores.append(float(target(x).detach().sum()))
        return scores[-1]

    transport(tuned, source, target, free, alignment=still, scale=[0.1, 1.0], score=score)
    assert np.isfinite(scores).all()
