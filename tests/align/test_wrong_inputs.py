"""What a caller may get wrong is answered by name, not by an error from far below."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from align_networks import mlp, resnet, trained_like
from safetensors.torch import save_file
from torch import Tensor, nn

import merganser as mg
from merganser.align import (
    ensemble,
    match,
    match_to_reference,
    merge_many,
    merging_order,
    quality_matrix,
    repair,
    reset_batch_norm,
    scramble,
    symmetry,
    transport,
    universe,
)
from merganser.errors import InputError

MODULE, KNOWN = mlp(6, 8, 3)
X = torch.randn(16, 6)


def models(count: int = 2) -> list[dict[str, Tensor]]:
    return [trained_like(MODULE, seed) for seed in range(count)]


def test_paths_are_opened(tmp_path: Path) -> None:
    first, second = models()
    for name, state in (("a", first), ("b", second)):
        save_file(state, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / "a.safetensors", str(tmp_path / "b.safetensors")]
    assert universe(paths, KNOWN).objective == universe([first, second], KNOWN).objective
    turned = scramble(first, KNOWN, seed=3)
    for path in (paths[0], str(paths[0])):
        assert all(torch.equal(tensor, turned[name]) for name, tensor in scramble(path, KNOWN, seed=3).items())
    moved = match(*paths, KNOWN).apply(paths[1])
    assert all(torch.equal(moved[name], t) for name, t in match(first, second, KNOWN).apply(second).items())


def test_a_universe_does_not_follow_its_modules() -> None:
    nets = []
    for state in models():
        nets.append(copy.deepcopy(MODULE))
        nets[-1].load_state_dict(state)
    found = universe(nets, KNOWN)
    before = found.merged()
    nets[0].load_state_dict(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.merged().items())


def with_tensor(change: Any) -> dict[str, Any]:
    state = models(1)[0]
    return state | {"0.weight": change(state["0.weight"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to("meta"), "'0.weight' of model 1 is on the meta device"),
        (lambda t: t.to(torch.float8_e4m3fn), "float8_e4m3fn: convert"),
        (lambda t: t.to(torch.cfloat), "is complex"),
        (lambda _: {"extra": 1}, "'0.weight' is no tensor but dict"),
    ],
)
def test_tensors_that_cannot_be_aligned(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        universe([models(1)[0], with_tensor(change)], KNOWN)


def test_modules_with_extra_state() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

    net = nn.Sequential(Extra(6, 8), nn.ReLU(), nn.Linear(8, 3))
    found = symmetry(net, X)
    for call in (lambda: universe([net, net], found), lambda: scramble(net, found)):
        with pytest.raises(InputError, match="_extra_state"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: match(a, b, KNOWN, method="ste"), "'ste' needs batches"),
        (lambda a, b: match(a, b, KNOWN, method="activations"), "'activations' needs batches"),
        (lambda a, b: match(a, b, KNOWN, start=match(a, b, KNOWN)), r"not Match; give its \.permutations"),
        (lambda a, b: match(a, b, KNOWN, "frank_wolfe", start=match(a, b, KNOWN)), r"give its \.permutations"),
        (lambda a, b: universe([a, b], KNOWN, start=universe([a, b], KNOWN)), "a start is a name or"),
        (lambda a, b: universe([a, b], KNOWN, workers=-1), "workers must be at least 1"),
        (lambda a, b: universe([a, 3], KNOWN), "a model is a module, a checkpoint, a path or a dict"),
        (lambda a, b: universe([a, b], KNOWN).subset([7]), "no model 7 in a universe of 2"),
        (lambda a, b: universe([a, b], KNOWN).subset([]), "at least one model"),
        (lambda a, b: universe([a, b], KNOWN).to_universe(5), "no model 5"),
        (lambda a, b: universe([a, b], KNOWN).pairwise(0, 5), "no model 5"),
        (lambda a, b: universe([a, b], KNOWN).merged([float("nan"), 1]), "finite weights"),
        (lambda a, b: quality_matrix([a, {n: t * 0 for n, t in b.items()}], KNOWN), "all zero"),
        (lambda a, b: merging_order([1.0, 2.0]), "square matrix"),
        (lambda a, b: merging_order([[1.0], [2.0, 3.0]]), "square matrix"),
        (lambda a, b: merging_order([[1.0, float("nan")], [0.0, 1.0]]), "not a number"),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(*models())


def test_activations_of_networks_without_freedom() -> None:
    """Batches were seen, and nothing was to be matched."""
    net = nn.Linear(6, 3)
    found = symmetry(net, X)
    assert match(net, net, found, method="activations", batches=[X]).permutations == {}
    with pytest.raises(InputError, match="no batch was seen"):
        match(net, net, found, method="activations", batches=[])


def test_the_order_of_a_list() -> None:
    assert merging_order([[1, 0.1, 0.2], [0.1, 1, 0.9], [0.2, 0.9, 1]]) == [1, 2, 0]


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_wrong_endpoints_weights_and_layers_of_a_repair(norm: str) -> None:
    module, _ = resnet(4, norm)
    module.eval()
    ends = [trained_like(module, seed) for seed in range(2)]
    batches = [torch.randn(8, 3, 8, 8)]
    name = next(name for name in ends[0] if ends[0][name].dim() == 4)
    other = ends[0] | {name: torch.zeros(2, 2)}
    fewer = {key: tensor for key, tensor in ends[0].items() if key != name}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([ends[0], other], {}, "of endpoint 1 is"),
        ([ends[0], fewer], {}, "only in the merged network"),
        (["/nowhere/at/all"], {}, "nowhere"),
        ([3], {}, "a model is a module"),
        (ends, {"weights": [1.0]}, "2 models need 2 finite weights"),
        (ends, {"weights": [1.0, float("inf")]}, "finite"),
        (ends, {"skip": ["nothing"]}, "no layer 'nothing'"),
        (ends, {"skip": "head"}, "write skip="),
    ]
    for endpoints, options, message in cases:
        with pytest.raises(InputError, match=message):
            repair(module, endpoints, batches, **options)
    with pytest.raises(InputError, match="give a module"):
        repair(ends[0], ends, batches)  # type: ignore[arg-type]


def test_a_batch_of_one_has_no_variance() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(InputError, match="more than one sample"):
        repair(net, [net, net], [X[:1]])


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_layers_that_compute_their_weight_are_left_alone(wrap: Any) -> None:
    net = nn.Sequential(wrap(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)).eval()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[2].weight.mul_(3)
    repaired = repair(net, [net, other], [X])
    assert torch.equal(repaired[0].weight, net[0].weight)
    assert not torch.equal(repaired[2].weight, net[2].weight)


def test_transport_of_float64_keeps_its_precision() -> None:
    double = [{n: t.double() for n, t in state.items()} for state in models()]
    tuned = {n: t + 1e-12 for n, t in double[0].items()}
    moved = transport(tuned, double[0], double[1], KNOWN)
    assert all(torch.all(moved[name] > tensor) for name, tensor in double[1].items())


def test_tied_weights_count_once_in_the_quality() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(9, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.mix(self.embed(x))))

    nets = [Tied(), Tied()]
    found = universe(nets, symmetry(nets[0], torch.zeros(2, 3, dtype=torch.long)))
    states = [{n: t for n, t in found.to_universe(i).items() if n != "head.weight"} for i in range(2)]
    flat = [torch.cat([t.double().flatten() for t in state.values()]) for state in states]
    expected = float(torch.dot(*flat) / flat[0].norm() / flat[1].norm())
    np.testing.assert_allclose(quality_matrix(found)[0, 1], expected)


@pytest.mark.parametrize("wrong", [X, None, "symmetry.json"])
@pytest.mark.parametrize(
    "call",
    [
        lambda a, b, s: match(a, b, s),
        lambda a, b, s: universe([a, b], s),
        lambda a, b, s: merge_many([a, b], s),
        lambda a, b, s: match_to_reference([a, b], s),
        lambda a, b, s: transport(a, a, b, s),
        lambda a, b, s: scramble(a, s),
    ],
)
def test_what_is_no_symmetry(call: Any, wrong: Any) -> None:
    with pytest.raises(InputError, match="aligned along a Symmetry"):
        call(*models(), wrong)


@pytest.mark.parametrize("call", [universe, merge_many, match_to_reference, quality_matrix])
def test_models_are_a_list(call: Any) -> None:
    first, second = models()
    with pytest.raises(InputError, match="models are a list"):
        call({"a": first, "b": second}, KNOWN)
    for single in ("ab", MODULE, 3):
        with pytest.raises(InputError, match="models are a list"):
            call(single, KNOWN)


def test_ensembles_are_drawn_from_a_universe() -> None:
    with pytest.raises(InputError, match="drawn from a Universe"):
        ensemble(MODULE, models())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="as a module"):
        ensemble(models()[0], universe(models(), KNOWN))  # type: ignore[arg-type]


def loaders() -> tuple[list[Any], list[Any]]:
    """Two batches as they are, and as a data loader gives them."""
    inputs, targets = X.split(8), torch.zeros(16, dtype=torch.long).split(8)
    return list(inputs), [[x, y] for x, y in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
def test_targets_beside_inputs_are_left_out(wrap: Any) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval()
    other = scramble(net, symmetry(net, X), seed=1)
    plain, pairs = loaders()
    pairs = [(wrap(x), y) for x, y in pairs]
    reset = [reset_batch_norm(net, batches).state_dict() for batches in (plain, pairs)]
    assert all(torch.equal(tensor, reset[1][name]) for name, tensor in reset[0].items())
    matched = [
        match(net, other, symmetry(net, X), "activations", batches=batches, standardize=True)
        for batches in (plain, pairs)
    ]
    for name, index in matched[0].permutations.items():
        np.testing.assert_array_equal(index, matched[1].permutations[name])
    flat, again = (repair(MODULE, models(), batches).state_dict() for batches in (plain, pairs))
    assert all(torch.equal(tensor, again[name]) for name, tensor in flat.items())


def test_a_pair_that_the_module_takes_is_its_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.norm(x + shift)

    reset = reset_batch_norm(Two(), [(X, torch.ones(6))])
    torch.testing.assert_close(reset.norm.running_mean, X.mean(0) + 1)


def test_batches_without_targets_where_they_are_needed() -> None:
    nets = [copy.deepcopy(MODULE) for _ in range(2)]
    for batches in ([X], [[X]], [(X, X, X)]):
        with pytest.raises(InputError, match="expected labelled batches"):
            match(*nets, KNOWN, "ste", batches=batches, loss=nn.functional.cross_entropy)


@pytest.mark.parametrize("batches", [X, 3, {"input": X}])
def test_a_single_batch_in_place_of_several(batches: Any) -> None:
    nets = [copy.deepcopy(MODULE) for _ in range(2)]
    with pytest.raises(InputError, match="expected a list of batches or a data loader"):
        match(*nets, KNOWN, "activations", batches=batches)
    with pytest.raises(InputError, match="expected a list of batches or a data loader"):
        match(*nets, KNOWN, "ste", batches=batches, loss=nn.functional.cross_entropy)
    with pytest.raises(InputError, match="expected a list of batches or a data loader"):
        reset_batch_norm(nets[0], batches)


def test_weights_that_are_not_numbers_are_refused_where_nothing_moves_too():
    module, free = mlp(3, 5, 2)
    states = [trained_like(module, seed) for seed in range(2)]
    states[1]["2.bias"][0] = torch.nan
    with pytest.raises(InputError, match="'2.bias' of model 1 has entries that are not finite"):
        universe(states, free)


def test_models_from_a_generator_are_read_once():
    module, free = mlp(3, 5, 2)
    batches = [torch.randn(8, 3)]
    assert len(universe((m for m in [module, module]), free, batches=batches)) == 2


def test_statistics_of_weights_without_a_network_are_refused():
    with pytest.raises(InputError, match="give a module, not OrderedDict"):
        reset_batch_norm(mlp(3, 5, 2)[0].state_dict(), [torch.randn(8, 3)])


@pytest.mark.parametrize("standardize", [True, False])
def test_nan_in_batches_is_named_before_anything_is_matched(standardize: bool) -> None:
    batch = X.clone()
    batch[3, 2] = torch.nan
    networks = [copy.deepcopy(MODULE), copy.deepcopy(MODULE)]
    calls = [
        lambda: match(*networks, KNOWN, method="activations", batches=[X, batch], standardize=standardize),
        lambda: universe(networks, KNOWN, batches=[X, batch], standardize=standardize),
        lambda: mg.align.zip(networks, KNOWN, [X, batch]),
    ]
    for call in calls:
        with pytest.raises(InputError, match="not finite: look for NaN or infinity in the batches"):
            call()


def test_moments_of_half_precision_do_not_overflow() -> None:
    networks = [copy.deepcopy(MODULE).half(), copy.deepcopy(MODULE).half()]
    found = match(*networks, KNOWN, method="activations", batches=[100 * X.half()], standardize=False)
    assert all((order == np.arange(len(order))).all() for order in found.permutations.values())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_are_of_any_integer_dtype(dtype: torch.dtype) -> None:
    labels = torch.arange(16) % 3
    networks = [copy.deepcopy(MODULE) for _ in range(3)]
    moved = [
        transport(*networks, KNOWN, gradient_batches=[(X, given)], scale=2.0) for given in (labels, labels.to(dtype))
    ]
    assert all(torch.equal(moved[1][name], tensor) for name, tensor in moved[0].items())


def test_a_symmetry_represents_itself_in_a_line() -> None:
    assert "\n" not in repr(KNOWN)
    assert len(repr(KNOWN)) < 100
    assert len(repr(match(MODULE, MODULE, KNOWN))) < 1000
