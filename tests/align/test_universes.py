"""C²M³ and its baselines: planted permutations, monotone objective, exact cycles, determinism."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from align_networks import attention, mlp, noisy_copies, resnet, trained_like, vgg

from merganser.align.baselines import match_to_reference, merge_many
from merganser.align.frank_wolfe import FrankWolfe
from merganser.align.matches import Match, Try
from merganser.align.matching import match
from merganser.align.permutations import apply, compose, identity, inverse
from merganser.align.solver import objective_of
from merganser.align.state import average
from merganser.align.universes import Universe, universe
from merganser.errors import InputError

NETWORKS = {
    "mlp": (lambda: mlp(10, 24, 20, 16, 4), (3, 10)),
    "resnet-batchnorm": (lambda: resnet(8, "batch"), (2, 3, 8, 8)),
    "resnet-layernorm": (lambda: resnet(8, "layer"), (2, 3, 8, 8)),
    "vgg": (lambda: vgg(8), (2, 3, 8, 8)),
    "attention": (lambda: attention(16, 4), (2, 5, 6)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    make, shape = NETWORKS[request.param]
    module, symmetry = make()
    return module, symmetry, shape


def outputs(module, state, shape):
    module.load_state_dict(state)
    module.double().eval()
    with torch.no_grad():
        result = module(torch.randn(shape, generator=torch.Generator().manual_seed(0)).double())
    module.float()
    return result


@pytest.mark.parametrize(
    "method", [universe, merge_many, partial(merge_many, method="frank_wolfe"), match_to_reference]
)
def test_planted_permutations_are_recovered_exactly(network, method):
    """Four copies, noise 10 % of each tensor's spread, seed 0: pairwise maps undo the scrambles, unit by unit."""
    module, symmetry, _ = network
    copies, planted = noisy_copies(trained_like(module, 0), symmetry, 4, noise=0.1, seed=0)
    found = method(copies, symmetry)
    best = objective_of(copies, [inverse(symmetry, p) for p in planted], symmetry)
    assert found.objective >= best * (1 - 1e-6)
    if method not in (universe, match_to_reference):
        return  # a local optimum of coordinate ascent may sit elsewhere with an equal objective
    for source in range(1, 4):
        expected = compose(symmetry, inverse(symmetry, planted[source]), planted[0])
        for name, index in found.pairwise(0, source).items():
            np.testing.assert_array_equal(index, expected[name])


def test_every_mapped_model_is_the_same_function(network):
    module, symmetry, shape = network
    models = [trained_like(module, seed) for seed in range(3)]
    found = universe(models, symmetry, solver=FrankWolfe(max_iterations=3))
    for position, model in enumerate(models):
        expected = outputs(module, model, shape)
        torch.testing.assert_close(outputs(module, found.to_universe(position), shape), expected)
        moved = apply(symmetry, found.pairwise(0, position), model)
        torch.testing.assert_close(outputs(module, moved, shape), expected)


@pytest.mark.parametrize("start", ["identity", "barycentre", "sinkhorn"])
def test_the_objective_never_falls(network, start):
    """Independent models in float64: Frank-Wolfe, rounding and polish each only raise f."""
    module, symmetry, _ = network
    models = [
        {n: t.double() if t.is_floating_point() else t for n, t in trained_like(module, s).items()} for s in (1, 2, 3)
    ]
    found = universe(models, symmetry, start=start, solver=FrankWolfe(max_iterations=25))
    scale = max(abs(step.objective) for step in found.trace)
    for before, after in pairwise(found.trace):
        if before.run == after.run:
            assert after.objective >= before.objective - 1e-10 * scale
    assert found.objective == pytest.approx(max(step.objective for step in found.trace), rel=1e-12)
    assert found.objective == pytest.approx(objective_of(found.models, found.permutations, symmetry))
    gaps = [step.gap for step in found.trace if step.gap is not None]
    assert min(gaps) >= -1e-9 * scale
    assert found.iterations == len(gaps) <= 25 * (1 + FrankWolfe().reheats)


def test_cycles_close_bit_for_bit_through_the_disk(network, tmp_path):
    module, symmetry, _ = network
    models = [trained_like(module, seed) for seed in range(3)]
    universe(models, symmetry, solver=FrankWolfe(max_iterations=2)).save(tmp_path / "u.safetensors")
    found = Universe.load(tmp_path / "u.safetensors", models)
    assert found.cycle_error() == 0.0
    walked = models[0]
    for source, target in ((0, 1), (1, 2), (2, 0)):
        walked = apply(symmetry, found.pairwise(target, source), walked)
    for name, tensor in models[0].items():
        assert torch.equal(walked[name], tensor)


def test_saved_universe_is_read_back_whole(tmp_path):
    module, symmetry = mlp(5, 8, 3)
    models = [trained_like(module, seed) for seed in range(3)]
    found = universe(models, symmetry)
    found.save(tmp_path / "u.safetensors")
    again = Universe.load(tmp_path / "u.safetensors", models)
    assert again.trace == found.trace
    assert again.objective == pytest.approx(found.objective)
    assert again.iterations == found.iterations > 0
    swapped = Universe.load(tmp_path / "u.safetensors", [models[2], models[0], models[1]])
    assert swapped.objective == pytest.approx(found.objective)
    for name, tensor in found.to_universe(0).items():
        assert torch.equal(swapped.to_universe(1)[name], tensor)
    other = {name: tensor + 1 for name, tensor in models[1].items()}
    for wrong in (other, models[0]):
        with pytest.raises(InputError, match=r"model 1 .* is not one of the models of .*u\.safetensors"):
            Universe.load(tmp_path / "u.safetensors", [models[0], wrong, models[2]])
    with pytest.raises(InputError, match="3 models, got 2"):
        Universe.load(tmp_path / "u.safetensors", models[:2])
    (tmp_path / "bad").write_bytes(b"not a universe")
    with pytest.raises(InputError, match="cannot read"):
        Universe.load(tmp_path / "bad", models)


def test_two_runs_give_the_same_bits(network):
    module, symmetry, _ = network
    models = [trained_like(module, seed) for seed in range(3)]
    for method, options in (
        (universe, {"workers": 1}),
        (universe, {"start": "sinkhorn", "seed": 3}),
        (merge_many, {"seed": 3}),
        (merge_many, {"seed": 3, "method": "frank_wolfe"}),
    ):
        first, second = method(models, symmetry, **options), method(models, symmetry, **(options | {"workers": 3}))
        assert first.objective == second.objective
        for a, b in zip(first.permutations, second.permutations, strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("inner", ["weights", "frank_wolfe"])
def test_merge_many_rises_with_every_pass(network, inner):
    module, symmetry, _ = network
    found = merge_many([trained_like(module, seed) for seed in range(4)], symmetry, method=inner, seed=1)
    values = [step.objective for step in found.trace]
    assert values == sorted(values)
    assert found.objective == pytest.approx(objective_of(found.models, found.permutations, symmetry), rel=1e-5)
    assert found.cycle_error() == 0.0


@pytest.mark.parametrize("inner", ["weights", "frank_wolfe"])
def test_merge_many_ends_where_no_model_fits_the_mean_of_the_others_better(inner):
    module, symmetry = mlp(6, 16, 12, 3)
    models = [trained_like(module, seed) for seed in range(3)]
    found = merge_many(models, symmetry, method=inner, seed=2)
    placed = [found.to_universe(i) for i in range(3)]
    for model in range(3):
        mean = average([placed[other] for other in range(3) if other != model])
        again = match(mean, placed[model], symmetry, method=inner, start=identity(symmetry))
        assert again.objective == pytest.approx(objective_of([mean, placed[model]], [identity(symmetry)] * 2, symmetry))


def test_merge_many_refuses_a_method_it_does_not_have():
    module, symmetry = mlp(6, 16, 12, 3)
    with pytest.raises(InputError, match="activations"):
        merge_many([trained_like(module, seed) for seed in range(2)], symmetry, method="activations")


def test_more_starts_are_never_worse():
    module, symmetry = mlp(6, 16, 12, 3)
    models = [trained_like(module, seed) for seed in range(3)]
    once = universe(models, symmetry, start="sinkhorn", seed=0)
    often = universe(models, symmetry, start="sinkhorn", seed=0, starts=4)
    assert often.objective >= once.objective
    again = universe(models, symmetry, start=list(often.permutations))
    assert again.objective >= often.objective * (1 - 1e-6)
    with pytest.raises(InputError, match="sinkhorn"):
        universe(models, symmetry, starts=2)


def test_reheating_is_never_worse_and_can_be_left_out():
    module, symmetry = mlp(6, 24, 24, 3)
    models = [trained_like(module, seed) for seed in range(3)]
    objectives = [universe(models, symmetry, solver=FrankWolfe(reheats=k)).objective for k in range(4)]
    assert objectives == sorted(objectives)
    assert objectives[1] > objectives[0]
    assert {step.run for step in universe(models, symmetry, solver=FrankWolfe(reheats=0)).trace} == {0}


def test_merged_is_the_weighted_mean_and_counters_are_kept():
    module, symmetry = resnet(4, "batch")
    models = [trained_like(module, seed) for seed in range(3)]
    for model in models:
        model["n0.num_batches_tracked"] = torch.tensor(7)
    found = universe(models, symmetry)
    merged = found.merged([1, 2, 1])
    mapped = [found.to_universe(i) for i in range(3)]
    assert merged["n0.num_batches_tracked"] == 7
    torch.testing.assert_close(
        merged["n0.running_mean"], sum(w * m["n0.running_mean"] for w, m in zip((0.25, 0.5, 0.25), mapped, strict=True))
    )
    with pytest.raises(InputError, match="weights"):
        found.merged([1, 2])


def test_running_statistics_move_but_do_not_count():
    module, symmetry = resnet(4, "batch")
    models = [trained_like(module, seed) for seed in range(2)]
    found = universe(models, symmetry)
    for model in models:
        model["n0.running_mean"] = model["n0.running_mean"] * 1000
    again = universe(models, symmetry)
    assert again.objective == found.objective
    index = again.permutations[1]["x"]
    assert torch.equal(again.to_universe(1)["n0.running_mean"], models[1]["n0.running_mean"][index])


def test_a_tree_on_two_axes_of_a_tensor():
    """A recurrent matrix PᵀWP: not linear in P, still no worse than where it started."""
    from merganser.align.symmetries import Atom, Factor, Symmetry, product

    axis = product(Factor("h", 12))
    symmetry = Symmetry({"h": Atom("h", 12)}, {"w": (axis, axis), "u": (axis, product(Factor(None, 5)))})
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(12, 12, generator=generator), "u": torch.randn(12, 5, generator=generator)}
    copies, planted = noisy_copies(base, symmetry, 3, noise=0.05, seed=2)
    found = universe(copies, symmetry)
    expected = compose(symmetry, inverse(symmetry, planted[1]), planted[0])
    np.testing.assert_array_equal(found.pairwise(0, 1)["h"], expected["h"])


def test_wrong_inputs_say_what_is_wrong():
    module, symmetry = mlp(5, 8, 3)
    good = trained_like(module, 0)
    with pytest.raises(InputError, match="at least 2"):
        universe([good], symmetry)
    with pytest.raises(InputError, match="only in the symmetry"):
        universe([good, {k: v for k, v in good.items() if k != "0.bias"}], symmetry)
    with pytest.raises(InputError, match="derived for"):
        universe([good, good | {"0.bias": torch.zeros(9)}], symmetry)
    with pytest.raises(InputError, match="not finite"):
        universe([good, good | {"0.bias": torch.full((8,), torch.nan)}], symmetry)
    with pytest.raises(InputError, match="did you mean 'barycentre'"):
        universe([good, good], symmetry, start="barycenter")
    with pytest.raises(InputError, match="reference"):
        match_to_reference([good, good], symmetry, reference=2)


def test_matching_to_a_reference_passes_on_what_its_matches_note(monkeypatch: pytest.MonkeyPatch) -> None:
    net, found = mlp(10, 24, 20, 16, 4)
    tries = (Try("propagate", 0, 1.0, 0.0), Try("identity", 1, 2.0, 0.0))
    stuck = Match(found, identity(found), 2.0, tries=tries, bound=9.0)
    monkeypatch.setattr("merganser.align.baselines.match", lambda *_, **__: stuck)
    (note,) = match_to_reference([net, net], found).notes
    assert note == f"model 1 to model 0: {stuck.note}"
    monkeypatch.undo()
    assert match_to_reference([net, net], found).notes == ()
