"""Zipping: against naive numpy, exact for copies and for models that contain each other, several heads."""

import copy

import numpy as np
import pytest
import torch
from align_networks import attention, mlp, resnet, trained_like
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from merganser.align import scramble, symmetry
from merganser.align import zip as zip_models
from merganser.align.unit_groups import group_units, groupable
from merganser.errors import InputError


def network(sizes, seed, dtype=torch.float64):
    module, free = mlp(*sizes)
    module.load_state_dict(trained_like(module, seed))
    return module.to(dtype), free


def inputs(count, width, seed=9):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def widened(module, factor):
    """The same function with every hidden unit split into several: written alike, read by random shares."""
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    generator = torch.Generator().manual_seed(0)
    made = []
    for place, layer in enumerate(layers):
        weight, bias = layer.weight.data, layer.bias.data
        if place:
            shares = torch.rand(factor, weight.shape[1], generator=generator, dtype=weight.dtype)
            weight = torch.cat([weight * share for share in shares / shares.sum(0)], dim=1)
        if place < len(layers) - 1:
            weight, bias = weight.repeat(factor, 1), bias.repeat(factor)
        new = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        new.load_state_dict({"weight": weight, "bias": bias})
        made += [new, nn.ReLU()]
    return nn.Sequential(*made[:-1])


def naive_groups(responses, count):
    """Complete linkage by its definition."""
    likeness = np.corrcoef(responses)
    groups = [[unit] for unit in range(len(likeness))]
    while len(groups) > count:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        a, b = max(pairs, key=lambda pair: likeness[np.ix_(groups[pair[0]], groups[pair[1]])].min())
        groups[b] += groups.pop(a)
    return {frozenset(group) for group in groups}


def as_sets(labels):
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


def test_groups_equal_complete_linkage_by_its_definition():
    responses = np.random.default_rng(0).standard_normal((11, 40))
    centred = responses - responses.mean(1, keepdims=True)
    for count in (11, 7, 3, 1):
        labels = group_units(torch.from_numpy(centred @ centred.T), count)
        assert as_sets(labels) == naive_groups(responses, count)
        assert set(labels) == set(range(count))


def test_an_mlp_equals_naive_numpy():
    (a, free), (b, _) = network((4, 7, 6, 3), 0), network((4, 7, 6, 3), 1)
    x = inputs(60, 4)
    zipped = zip_models([a, b], free, [x[:30], x[30:]])
    found = {name: tensor.numpy() for name, tensor in zipped.merged().items()}
    hidden = [[], []]
    for layer in (0, 2):
        responses = np.concatenate([m[: layer + 1](x).detach().numpy().T for m in (a, b)])
        width = responses.shape[0] // 2
        assert as_sets(np.concatenate(zipped.groups[f"h{layer // 2 + 1}"])) == naive_groups(responses, width)
        labels = np.concatenate(zipped.groups[f"h{layer // 2 + 1}"])
        hidden[layer // 2] = np.eye(width)[labels].T  # groups × units of both
    states = [{n: t.numpy() for n, t in m.state_dict().items()} for m in (a, b)]

    def diagonal(name):
        one, two = (s[name] for s in states)
        return np.block([[one, np.zeros_like(one)], [np.zeros_like(two), two]])

    first, second = hidden
    mean = [z / z.sum(1, keepdims=True) for z in hidden]
    stacked = np.concatenate([s["0.weight"] for s in states])
    np.testing.assert_allclose(found["0.weight"], mean[0] @ stacked, atol=1e-12)
    np.testing.assert_allclose(found["2.weight"], mean[1] @ diagonal("2.weight") @ first.T, atol=1e-12)
    np.testing.assert_allclose(found["2.bias"], mean[1] @ np.concatenate([s["2.bias"] for s in states]), atol=1e-12)
    both = np.concatenate([s["4.weight"] for s in states], axis=1) @ second.T / 2
    np.testing.assert_allclose(found["4.weight"], both, atol=1e-12)
    np.testing.assert_allclose(found["4.bias"], (states[0]["4.bias"] + states[1]["4.bias"]) / 2, atol=1e-12)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 4))
def test_scrambled_copies_zip_to_the_function_they_have(seed, count):
    module, free = network((4, 9, 8, 3), seed)
    x = inputs(50, 4)
    zipped = zip_models([scramble(module, free, seed + i) for i in range(count)], free, [x])
    again = copy.deepcopy(module)
    again.load_state_dict(zipped.merged())
    torch.testing.assert_close(again(x), module(x))


@pytest.mark.parametrize("into", ["narrow", "wide"])
def test_a_model_and_a_wider_one_that_contains_it(into):
    module, free = network((4, 6, 5, 3), 3)
    wide = widened(module, 2)
    broad = symmetry(wide, inputs(2, 4))
    narrow = symmetry(module, inputs(2, 4))
    x = inputs(50, 4)
    target, template = (narrow, module) if into == "narrow" else (broad, wide)
    zipped = zip_models([module, wide], [narrow, broad], [x], into=target)
    torch.testing.assert_close(zipped.module(template)(x), module(x))
    assert next(iter(free.atoms))


def test_a_convolutional_network_with_batch_norm_and_shortcuts():
    module, free = resnet(5, "batch")
    module.load_state_dict(trained_like(module, 2))
    module = module.double().eval()
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert all(groupable(module, free, x[:2]).values())
    zipped = zip_models([module, scramble(module, free, 3)], free, [x])
    assert zipped.groups.keys() == free.atoms.keys()
    assert not zipped.notes
    torch.testing.assert_close(zipped.module(module).eval()(x), module(x))


def test_units_that_are_normalised_together_are_matched_one_to_one():
    module, free = attention(12, 3)
    module.load_state_dict(trained_like(module, 2))
    module = module.double()
    x = torch.randn(10, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert groupable(module, free, x[:2]) == {"stream": False, "hidden": True}
    zipped = zip_models([module, scramble(module, free, 3)], free, [x])
    assert list(zipped.groups) == ["hidden"]
    assert zipped.notes == ("matched one to one, not grouped: stream, head",)
    torch.testing.assert_close(zipped.module(module)(x), module(x))


def test_heads_share_what_comes_before_them_and_run_it_once():
    module, free = network((4, 9, 8, 3), 1)
    other = scramble(module, free, 5)
    with torch.no_grad():
        other[4].weight.mul_(-2.0)
    x = inputs(50, 4)
    zipped = zip_models([module, other], free, [(x, torch.zeros(50, dtype=torch.int64))], until="4")
    assert zipped.shared == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with pytest.raises(InputError, match="2 heads"):
        zipped.merged()
    both = zipped.module(module)
    runs = []
    for head in both.heads:
        head[2].register_forward_hook(lambda *_: runs.append(1))
    one, two = both(x)
    torch.testing.assert_close(one, module(x))
    torch.testing.assert_close(two, other(x))
    assert both.once == ("0", "2")
    assert len(list(both.parameters())) == 4 + 2 * 2
    one.sum().backward()
    assert both.heads[1][0].weight.grad is not None


def test_a_tail_in_the_middle_of_a_stream():
    module, free = resnet(5, "batch")
    module.load_state_dict(trained_like(module, 2))
    module = module.double().eval()
    other = scramble(module, free, 3)
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zipped = zip_models([module, other], free, [x], until="b1")
    assert "a1.weight" in zipped.shared
    assert "b1.weight" not in zipped.shared
    for output in zipped.module(module).eval()(x):
        torch.testing.assert_close(output, module(x))


class Attending(nn.Module):
    """Torch's own attention, which has weights and a layer inside that is never called."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("until", ["first", "attention", "last"])
def test_a_layer_with_layers_inside_belongs_to_the_tail_it_runs_in(until):
    module, other = Attending().double(), Attending().double()
    x = torch.randn(12, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    zipped = zip_models([module, other], symmetry(module, x[:2]), [x], until=until)
    order = ["first", "attention", "last"]
    before = {name for layer in order[: order.index(until)] for name in module.state_dict() if name.startswith(layer)}
    assert zipped.shared == before
    if until == "first":  # everything is separate, so both heads are the models themselves
        for output, model in zip(zipped.module(module)(x), (module, other), strict=True):
            torch.testing.assert_close(output, model(x))


class Upsampling(nn.Module):
    """A convolution and a transposed one, flattened into a linear layer."""

    def __init__(self, width, high):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, width, 3, 2, 1), nn.ConvTranspose2d(width, high, 2, 2)
        self.last = nn.Linear(high * 16, 4)

    def forward(self, x):
        return self.last(self.up(self.down(x).relu()).relu().flatten(1))


class Turned(nn.Module):
    """Layers that store their weights as inputs × outputs, as GPT-2 does."""

    def __init__(self, width):
        super().__init__()
        make = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.first, self.last = make(width, 6), make(4, width)

    def forward(self, x):
        return self.last(self.first(x).relu())


@pytest.mark.parametrize(
    ("make", "narrow", "wide", "shape"),
    [(Upsampling, (3, 4), (5, 6), (20, 3, 4, 4)), (Turned, (5,), (8,), (20, 6))],
)
def test_layers_with_turned_weights_are_grouped_by_what_they_write(make, narrow, wide, shape):
    small, large = make(*narrow).double(), make(*wide).double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both = [symmetry(small, x[:2]), symmetry(large, x[:2])]
    assert all(groupable(small, both[0], x[:2]).values())
    zipped = zip_models([small, scramble(small, both[0], 3)], both[0], [x])
    assert zipped.groups.keys() == both[0].atoms.keys()
    torch.testing.assert_close(zipped.module(small)(x), small(x))
    assert zip_models([small, large], both, [x]).module(large)(x).isfinite().all()


def test_grouping_beats_averaging_of_strangers():
    """Not exact, but closer to the mean of the functions than the mean of the weights."""
    (a, free), (b, _) = network((4, 40, 3), 0), network((4, 40, 3), 1)
    x = inputs(200, 4)
    target = (a(x) + b(x)) / 2
    plain = copy.deepcopy(a)
    plain.load_state_dict({n: (t + b.state_dict()[n]) / 2 for n, t in a.state_dict().items()})
    made = zip_models([a, b], free, [x]).module(a)
    assert (made(x) - target).norm() < 0.8 * (plain(x) - target).norm()


def test_wrong_input_is_refused():
    (a, free), (b, wide) = network((4, 7, 3), 0), network((4, 9, 3), 1)
    x = inputs(20, 4)
    cases = [
        (([a], free, [x]), {}, "two or more modules"),
        (([a.state_dict(), a.state_dict()], free, [x]), {}, "not weights"),
        (([a, b], [free], [x]), {}, "a symmetry each"),
        (([a, b], free, [x]), {}, "the symmetry was derived for"),
        (([a, a], free, []), {}, "no batch was seen"),
        (([a, a], free, [x]), {"until": "9"}, "no layer '9'"),
        (([a, b], [free, wide], [x]), {"into": mlp(4, 30, 3)[1]}, "30 units of 16"),
        (([a, b], [free, mlp(4, 9, 5, 3)[1]], [x]), {}, "different layers"),
    ]
    for given_, options, message in cases:
        with pytest.raises(InputError, match=message):
            zip_models(*given_, **options)
    stream, own = attention(12, 3)
    narrow, less = attention(9, 3)
    tokens = torch.randn(4, 5, 6)
    with pytest.raises(InputError, match="as many in every model"):
        zip_models([stream, narrow], [own, less], [tokens])


class Residual(nn.Module):
    """A stream of 8 units, which are normalised together, beside hidden ones of any width."""

    def __init__(self, width, inplace=False):
        super().__init__()
        self.first, self.norm, self.up = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, width)
        self.act, self.down, self.last = nn.ReLU(inplace), nn.Linear(width, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        change = self.down(self.act(self.up(self.norm(x))))
        change += x
        return self.last(change)


def test_units_that_are_normalised_together_beside_others_of_unequal_width():
    narrow = Residual(5)
    narrow.load_state_dict(trained_like(narrow, 2))
    narrow, wide = narrow.double(), Residual(10).double()
    copies = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    wide.load_state_dict(
        {
            n: torch.cat([t, t], copies[n]) / (1 + copies[n]) if n in copies else t
            for n, t in narrow.state_dict().items()
        }
    )
    x = inputs(60, 6)
    free, more = symmetry(narrow, x), symmetry(wide, x)
    zipped = zip_models([narrow, scramble(wide, more, 3)], [free, more], [x])
    assert zipped.notes == ("matched one to one, not grouped: first",)
    torch.testing.assert_close(zipped.module(wide)(x), narrow(x))
    torch.testing.assert_close(zip_models([wide, narrow], [more, free], [x], into=free).module(narrow)(x), narrow(x))


def test_layers_that_change_their_input_in_place_do_not_spoil_the_other_heads():
    module = Residual(5, inplace=True)
    module.load_state_dict(trained_like(module, 2))
    module = module.double().eval()
    x = inputs(40, 6)
    zipped = zip_models([module, scramble(module, free := symmetry(module, x), 3)], free, [x], until="last")
    assert "down" in zipped.module(module).once
    for output in zipped.module(module)(x):
        torch.testing.assert_close(output, module(x))


def test_a_result_of_another_architecture_is_refused():
    (a, free), (b, _), (_, classes) = network((4, 7, 3), 0), network((4, 7, 3), 1), mlp(4, 7, 5)
    x = inputs(20, 4)
    with pytest.raises(InputError, match="the result has different layers from model 0"):
        zip_models([a, b], free, [x], into=mlp(4, 7, 5, 3)[1])
    with pytest.raises(InputError, match="the result has different layers from model 0"):
        zip_models([a, b], free, [x], into=classes)
