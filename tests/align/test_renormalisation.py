"""REPAIR restores the statistics of the endpoints, exactly where it says so."""

from __future__ import annotations

import copy

import pytest
import torch
from align_networks import attention, mlp, resnet, trained_like, vgg
from torch import Tensor, nn

from merganser.align.renormalisation import repair, reset_batch_norm
from merganser.align.universes import universe
from merganser.errors import InputError
from merganser.modules.moments import Moments


def batches_of(shape, count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).double() for _ in range(count)]


def merged_and_endpoints(make, models=3):
    module, symmetry = make()
    found = universe([trained_like(module, seed) for seed in range(models)], symmetry)
    loaded = []
    for state in [found.merged(), *(found.to_universe(i) for i in range(models))]:
        loaded.append(copy.deepcopy(module))
        loaded[-1].load_state_dict(state)
    return [m.double().eval() for m in loaded]


def statistics(module, name, batches):
    """Mean and std of every channel, from all outputs at once."""
    outputs = []
    layer = module.get_submodule(name)
    handle = layer.register_forward_hook(lambda _m, _i, output: outputs.append(output.detach()))
    with torch.no_grad():
        for inputs in batches:
            module(inputs)
    handle.remove()
    rows = torch.cat([o.movedim(1, -1) if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) else o for o in outputs])
    rows = rows.reshape(-1, rows.shape[-1])
    return rows.mean(0), rows.std(0, unbiased=False)


class Turned(nn.Module):
    """Layers that store their weights as inputs × outputs: transposed convolutions and transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 5, 2)
        self.first = pytest.importorskip("transformers").pytorch_utils.Conv1D(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(self.up(x).relu().movedim(1, -1).contiguous())
        return out


@pytest.mark.parametrize("sequential", [True, False])
def test_layers_with_turned_weights_are_repaired(sequential):
    merged, *endpoints = (Turned().double() for _ in range(3))
    for scale, module in enumerate([merged, *endpoints]):
        module.up.weight.data *= 1 + scale
    batches = batches_of((8, 3, 6, 6), 1)
    repaired = repair(merged, endpoints, batches, sequential=sequential)
    for name in ("up", "first"):
        goals = [statistics(module, name, batches) for module in endpoints]
        for found, first, second in zip(statistics(repaired, name, batches), *goals, strict=True):
            torch.testing.assert_close(found, (first + second) / 2)


NETWORKS = {
    "mlp": (lambda: mlp(6, 12, 10, 3), (16, 6), ["0", "2", "4"]),
    "vgg": (lambda: vgg(4), (8, 3, 8, 8), ["0", "3", "6", "8"]),
    "attention": (lambda: attention(12, 3), (8, 5, 6), ["embed", "norm", "qkv", "out", "up", "down", "head"]),
    "resnet": (lambda: resnet(4, "layer"), (8, 3, 8, 8), ["n0.norm", "m1.norm", "short", "n2.norm", "head"]),
}


@pytest.mark.parametrize("case", NETWORKS)
@pytest.mark.parametrize("weights", [None, [3.0, 2.0, 1.0]])
def test_repair_restores_mean_and_std(case, weights):
    make, shape, layers = NETWORKS[case]
    merged, *endpoints = merged_and_endpoints(make)
    batches = batches_of(shape)
    before = copy.deepcopy(merged.state_dict())
    repaired = repair(merged, endpoints, batches, weights=weights)
    shares = [1 / 3] * 3 if weights is None else [w / 6 for w in weights]
    for layer in layers:
        ends = [statistics(e, layer, batches) for e in endpoints]
        mean, std = statistics(repaired, layer, batches)
        torch.testing.assert_close(mean, sum(w * m for w, (m, _) in zip(shares, ends, strict=True)))
        torch.testing.assert_close(std, sum(w * s for w, (_, s) in zip(shares, ends, strict=True)))
    assert all(torch.equal(before[n], t) for n, t in merged.state_dict().items())
    assert {n: t.shape for n, t in repaired.state_dict().items()} == {n: t.shape for n, t in before.items()}


def test_a_layer_without_bias_gets_its_spread():
    merged, *endpoints = merged_and_endpoints(lambda: resnet(4, "layer"))
    batches = batches_of((8, 3, 8, 8))
    repaired = repair(merged, endpoints, batches)
    for layer in ("stem", "b1"):
        wanted = sum(statistics(e, layer, batches)[1] for e in endpoints) / 3
        torch.testing.assert_close(statistics(repaired, layer, batches)[1], wanted)


def test_one_pass_is_exact_on_a_single_batch_and_near_on_many():
    make, shape, layers = NETWORKS["vgg"]
    merged, *endpoints = merged_and_endpoints(make)
    [batch] = batches_of(shape, 1)
    exact = repair(merged, endpoints, [batch])
    quick = repair(merged, endpoints, [batch], sequential=False)
    for name, tensor in exact.state_dict().items():
        torch.testing.assert_close(quick.state_dict()[name], tensor)
    batches = batches_of((64, *shape[1:]))
    quick = repair(merged, endpoints, batches, sequential=False)
    for layer in layers:
        wanted = sum(statistics(e, layer, batches)[1] for e in endpoints) / 3
        torch.testing.assert_close(statistics(quick, layer, batches)[1], wanted, rtol=0.1, atol=0.01)


def test_states_are_endpoints_too_and_layers_can_be_skipped():
    make, shape, _ = NETWORKS["mlp"]
    merged, *endpoints = merged_and_endpoints(make)
    batches = batches_of(shape)
    skipped = repair(merged, [e.state_dict() for e in endpoints], batches, skip=["4"])
    assert torch.equal(skipped.get_submodule("4").weight, merged.get_submodule("4").weight)
    whole = repair(merged, endpoints, batches)
    assert torch.equal(skipped.get_submodule("2").weight, whole.get_submodule("2").weight)
    with pytest.raises(InputError, match="'5'"):
        repair(merged, endpoints, batches, skip=["5"])
    with pytest.raises(InputError, match="endpoints"):
        repair(merged, [], batches)
    with pytest.raises(InputError, match="no batches"):
        repair(merged, endpoints, [])


def test_a_dead_channel_is_shifted_only():
    module, _ = mlp(4, 5, 2)
    ends = []
    for seed in range(2):
        state = trained_like(module, seed)
        state["0.weight"][2] = 0.0
        ends.append(state)
    module.load_state_dict(ends[0])
    repaired = repair(module.double(), ends, batches_of((8, 4)))
    assert torch.isfinite(repaired.get_submodule("0").weight).all()
    wanted = (ends[0]["0.bias"][2] + ends[1]["0.bias"][2]).double() / 2
    torch.testing.assert_close(repaired.get_submodule("0").bias[2], wanted)


def test_batch_norm_networks_get_recomputed_statistics():
    merged, *endpoints = merged_and_endpoints(lambda: resnet(4, "batch"))
    batches = batches_of((16, 3, 8, 8))
    before = copy.deepcopy(merged.state_dict())
    repaired = repair(merged, endpoints, batches)
    # The first BatchNorm sees the stem's output, which nothing before it changes.
    outputs = [merged.stem(x).detach() for x in batches]
    mean = torch.stack([o.mean((0, 2, 3)) for o in outputs]).mean(0)
    torch.testing.assert_close(repaired.n0.running_mean, mean)
    assert not torch.equal(repaired.n2.running_var, merged.n2.running_var)
    assert torch.equal(repaired.a1.weight, merged.a1.weight)
    assert repaired.n0.momentum == merged.n0.momentum
    assert all(torch.equal(before[n], t) for n, t in merged.state_dict().items())
    again = reset_batch_norm(merged, batches)
    assert torch.equal(again.n2.running_var, repaired.n2.running_var)
    assert not again.n0.training


def test_moments_merge_like_the_whole():
    rows = torch.randn(37, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1e3
    moments = Moments()
    for part in rows.split([5, 1, 20, 11]):
        moments.add(part)
    mean, std = moments.values
    torch.testing.assert_close(mean, rows.double().mean(0))
    torch.testing.assert_close(std, rows.double().std(0, unbiased=False))
    with pytest.raises(InputError, match="no batch"):
        _ = Moments().values


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of each pixel, channels in front."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_layer_norm_with_channels_in_front(sequential):
    """As many pixels in a row as channels, so that the wrong axis would fit too."""
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), LayerNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
        nn.init.normal_(module[1].weight, 1.0, 0.3)
        nn.init.normal_(module[1].bias)
        models.append(module.double().eval())
    merged = copy.deepcopy(models[0])
    merged.load_state_dict({k: sum(m.state_dict()[k] for m in models) / 3 for k in merged.state_dict()})
    batches = batches_of((16, 3, 8, 8), count=1)
    repaired = repair(merged, models, batches, sequential=sequential)

    def channels(model):
        with torch.no_grad():
            rows = model[:2](batches[0]).movedim(1, -1).reshape(-1, 8)
        return rows.mean(0), rows.std(0, unbiased=False)

    wanted = [torch.stack(each).mean(0) for each in zip(*map(channels, models), strict=True)]
    for found, goal in zip(channels(repaired), wanted, strict=True):
        torch.testing.assert_close(found, goal, rtol=1e-9, atol=1e-9)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, gate):
        return self.inner(x * gate)


def test_a_tuple_is_the_arguments_of_the_model_or_has_targets_beside_them():
    torch.manual_seed(0)
    ends = [Gated().double() for _ in range(2)]
    x, gate = torch.randn(16, 4).double(), torch.rand(16, 4).double()
    by_position, by_name = (repair(ends[0], ends, [batch]) for batch in ((x, gate), {"x": x, "gate": gate}))
    plain = repair(ends[0].inner, [end.inner for end in ends], [x * gate])
    for found in (by_position, by_name):
        torch.testing.assert_close(found.inner.state_dict(), plain.state_dict())
    for call in (repair, lambda model, ends, batches: reset_batch_norm(model, batches)):
        beside, alone = (call(plain, [plain], [batch]).state_dict() for batch in ((x, torch.zeros(16)), x))
        torch.testing.assert_close(beside, alone)
        with pytest.raises(InputError, match="leave out targets"):
            call(plain, [plain], [(x, torch.zeros(16), torch.zeros(16))])


def test_batch_norm_weighs_batches_by_their_samples():
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).double()
    parts = [part[:size] for part, size in zip(batches_of((30, 5)), (30, 3, 17), strict=True)]
    for batches in (parts, [(part, torch.zeros(len(part))) for part in parts]):
        norm = reset_batch_norm(network, batches)[1]
        outputs = [network[0](part).detach() for part in parts]
        share = [len(part) / 50 for part in parts]
        for stored, moment in ((norm.running_mean, Tensor.mean), (norm.running_var, Tensor.var)):
            expected = sum(w * moment(o, 0) for w, o in zip(share, outputs, strict=True))
            torch.testing.assert_close(stored, expected)


@pytest.mark.parametrize("make", [lambda: mlp(6, 12, 10, 3), lambda: resnet(4, "batch")])
def test_batches_with_nan_are_refused(make):
    merged, *endpoints = merged_and_endpoints(make, 2)
    shape = (16, 6) if isinstance(merged, nn.Sequential) else (8, 3, 8, 8)
    batches = batches_of(shape)
    batches[1][0] = torch.nan
    with pytest.raises(InputError, match=r"activations of '.*' are not finite: look for NaN"):
        repair(merged, endpoints, batches)
