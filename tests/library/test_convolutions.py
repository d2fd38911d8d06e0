"""Convolutional experts: kernels are matrices in libraries, in interference and in input-adaptive models."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from merganser.errors import InputError
from merganser.interference import survey
from merganser.library import Library
from merganser.library.unfolding import as_matrix, is_matrix
from merganser.methods.base import Group
from merganser.methods.registry import build
from merganser.methods.tsv import TSV
from merganser.modules.activations import capture, matrix_layers
from merganser.modules.convolutions import convolve, count_patches, is_plain, pool_patches
from merganser.modules.inputs import Inputs
from merganser.routing import AdaptiveModel, Smile, score_layers
from merganser.routing.composition import LowRankUpdate, applied

TASKS = ("cats", "dogs", "cars", "ships")
KERNELS = ("stem.weight", "down.weight", "dilated.weight", "point.weight")


class Network(nn.Module):
    """samples × 3 × 12 × 12 to samples × 24."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped = nn.Conv2d(32, 32, 3, padding="same", groups=2)
        self.dilated = nn.Conv2d(32, 32, (3, 2), padding="same", dilation=2)
        self.up = nn.ConvTranspose2d(32, 16, 2)
        self.point = nn.Conv2d(16, 24, 1)

    def forward(self, x):
        x = F.gelu(self.down(F.gelu(self.norm(self.stem(x)))))
        x = F.gelu(self.dilated(self.grouped(self.depthwise(x))))
        return self.point(F.gelu(self.up(x))).mean((2, 3))


def network(seed=0):
    torch.manual_seed(seed)
    return Network().eval()


def expert_of(base, seed, rank=None, size=0.1):
    """Every float tensor moved at random, kernels by an unfolded matrix of this rank."""
    rng = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in base.state_dict().items():
        if not tensor.is_floating_point() or "running" in name:
            state[name] = tensor.clone()
            continue
        delta = torch.randn(tensor.shape, generator=rng)
        if tensor.dim() > 2 and rank is not None:
            flat = tensor.flatten(1)
            left = torch.randn(flat.shape[0], rank, generator=rng)
            delta = (left @ torch.randn(rank, flat.shape[1], generator=rng)).view(tensor.shape) / rank**0.5
        state[name] = tensor + size * delta
    return state


def library_of(path, base, rank=None, tasks=TASKS, **options):
    experts = {task: expert_of(base, seed, rank) for seed, task in enumerate(tasks, start=1)}
    return Library.build(base.state_dict(), experts, path / "lib", **options), experts


def unfolded(state, base, name):
    return (state[name].double() - base.state_dict()[name].double()).flatten(1).numpy()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 4), True),
        ((8, 1), False),
        ((8,), False),
        ((), False),
        ((64, 32, 3, 3), True),
        ((64, 32, 1, 1), True),
        ((64, 1, 3, 3), False),  # depthwise
        ((512, 512, 10), True),  # one-dimensional
        ((8, 256, 128), False),  # the experts of a mixture
        ((1, 197, 768), False),  # positions
        ((16, 4, 3, 3, 3), True),
    ],
)
def test_what_counts_as_a_matrix(shape, expected):
    assert is_matrix(shape) is expected


def test_kernels_are_kept_as_factors_with_the_discarded_energy_as_error(tmp_path):
    base = network()
    library, experts = library_of(tmp_path, base)
    for task in TASKS:
        kinds = library.expert(task).file.kinds
        assert {kinds[name] for name in KERNELS[1:3]} == {"factors"}
        assert kinds["depthwise.weight"] == "full"
        for name in ("down.weight", "dilated.weight", "grouped.weight", "up.weight"):
            delta = unfolded(experts[task], base, name)
            u, s, vt = np.linalg.svd(delta, full_matrices=False)
            k = min(delta.shape) // len(TASKS)
            naive = (u[:, :k] * s[:k]) @ vt[:k]
            rebuilt = library.expert(task).read(name)
            assert rebuilt.shape == experts[task][name].shape
            found = (rebuilt.double() - base.state_dict()[name].double()).flatten(1).numpy()
            np.testing.assert_allclose(found, naive, atol=2e-6)
            assert library.factors(task, name).rank == k
            np.testing.assert_allclose(library.expert(task).delta(name).flatten(1), naive, atol=2e-6)
            assert torch.equal(library.expert(task).read(name, (3, 9)), rebuilt[3:9])
    whole = sum(t.nbytes for t in base.state_dict().values())
    assert library.size().ratio < 3.2, "whole kernels would make it five times the base"
    assert library.size().base == pytest.approx(whole, rel=0.01)
    assert all(finding.sound for finding in library.verify())


def test_low_rank_kernels_come_back_exactly(tmp_path):
    base = network()
    library, experts = library_of(tmp_path, base, rank=2, energy=0.999999)
    out = library.extract("cats", tmp_path / "cats")
    from merganser.checkpoints.opening import open as open_checkpoint

    for name in KERNELS:
        torch.testing.assert_close(open_checkpoint(out).read(name), experts["cats"][name], atol=1e-5, rtol=0)


def test_budgets_hold_for_kernels(tmp_path):
    base = network()
    library, _ = library_of(tmp_path, base, budget=90_000)
    assert sum(library.size().experts.values()) <= 90_000
    assert all(record.energy > 0.2 for record in library.manifest.experts.values())


@pytest.mark.parametrize("stored", [False, True])
def test_interference_measures_kernels(tmp_path, stored):
    base = network()
    library, experts = library_of(tmp_path, base)
    found = survey(library) if stored else survey(base.state_dict(), experts)
    by_name = {matrix.name: matrix for matrix in found.matrices}
    assert set(KERNELS) <= set(by_name)
    assert "depthwise.weight" not in by_name
    name = "down.weight"
    k = 32 // len(TASKS)
    parts = [np.linalg.svd(unfolded(experts[task], base, name), full_matrices=False) for task in TASKS]
    u = np.hstack([p[0][:, :k] for p in parts])
    s = np.concatenate([p[1][:k] for p in parts])
    v = np.hstack([p[2][:k].T for p in parts])
    eye = np.eye(len(s))
    sti = np.abs((u.T @ u - eye) * s @ (v.T @ v - eye)).sum()
    assert by_name[name].sti == pytest.approx(sti, rel=1e-4)
    assert by_name[name].shape == (32, 144)
    flat = {task: np.concatenate([unfolded(experts[task], base, n).ravel() for n in KERNELS]) for task in TASKS}
    assert abs(found.cosine[0][1]) < 0.2 > abs(np.corrcoef(flat["cats"], flat["dogs"])[0, 1])


def test_merging_is_the_method_with_kernels_as_matrices(tmp_path):
    base = network()
    library, experts = library_of(tmp_path, base, rank=3, energy=0.9999999)
    state = base.state_dict()
    rule = build(TSV, {"convolutions": True}, TASKS)
    averaging = build(TSV, {}, TASKS)
    merged, means = library.merge(), library.merge(convolutions=False)
    for name in KERNELS:
        models = [experts[task][name] for task in TASKS]
        group = Group(name=name, models=tuple(models), labels=TASKS, base=state[name])
        torch.testing.assert_close(merged.read(name), rule.merge(group), atol=2e-5, rtol=0)
        torch.testing.assert_close(means.read(name), averaging.merge(group), atol=2e-5, rtol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), axes=st.integers(1, 3))
def test_patches_and_low_rank_updates_are_those_of_the_whole_kernel(data, axes):
    def each(low, high):
        return tuple(data.draw(st.integers(low, high)) for _ in range(axes))

    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    window, stride, dilation, padding = each(1, 3), each(1, 3), each(1, 2), each(0, 2)
    mode = data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    if data.draw(st.booleans()):
        padding, stride = "same", 1
    layer = kind(3, 5, window, stride, padding, dilation, padding_mode=mode, bias=False).double()
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    x = torch.randn(2, 3, *(7 + i for i in range(axes)), generator=rng, dtype=torch.float64)
    output = layer(x)
    matrix = as_matrix(layer.weight)
    torch.testing.assert_close(convolve(layer, x, matrix), output)
    assert count_patches(layer, x) == output[0, 0].numel()
    flat = output.flatten(2)
    for pooling, expected in (("mean", flat.mean(2)), ("first", flat[..., 0]), ("last", flat[..., -1])):
        torch.testing.assert_close(pool_patches(layer, x, pooling) @ matrix.T, expected)
    left, right = (torch.randn(n, 4, generator=rng, dtype=torch.float64) for n in matrix.shape)
    core = torch.randn(4, 4, generator=rng, dtype=torch.float64)
    update = LowRankUpdate((left[:, :1], left[:, 1:]), core, (right[:, :1], right[:, 1:]))
    changed = update.added_to(layer.weight.detach())
    torch.testing.assert_close(changed, layer.weight + (left @ core @ right.T).view(layer.weight.shape))
    torch.testing.assert_close(output + update.applied_to(x, layer), layer._conv_forward(x, changed, None))


def test_grouped_transposed_and_overridden_convolutions_are_left_to_whole_kernels():
    class Own(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight * 2, bias)

    assert is_plain(nn.Conv2d(4, 4, 3))
    assert not is_plain(nn.Conv2d(4, 4, 3, groups=2))
    assert not is_plain(nn.ConvTranspose2d(4, 4, 3))
    assert not is_plain(Own(4, 4, 3))
    assert set(matrix_layers(network())) == {"stem", "down", "dilated", "point"}


def naive(library, base, tasks, x):
    """The output with the merge of a set loaded as whole tensors."""
    module = network()
    low_rank = {"low_rank": False} if len(tasks) == 1 else {}
    names = [name for name in library.experts if name in tasks]
    source = library.expert(names[0]) if len(names) == 1 else library.merge(names, **low_rank)
    module.load_state_dict({name: source.read(name) for name in base.state_dict()})
    with torch.no_grad():
        return module.eval()(x)


@pytest.mark.parametrize("top", [1, 2])
def test_an_adaptive_model_runs_the_merge_of_each_set(tmp_path, top):
    base = network()
    library, _ = library_of(tmp_path, base, rank=2, tasks=TASKS[:3], rank_fraction=0.1)
    model = AdaptiveModel(network(), library, threshold=0.0, top=top)
    assert set(model.router.layers) == {"stem", "down"}
    x = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(5))
    composition = model.composition(frozenset(TASKS[:top]), 1)
    assert {"down.weight", "dilated.weight"} <= set(composition.low_rank), "updates beside the layers"
    assert {"grouped.weight", "up.weight"} <= set(composition.whole)
    routed = model(x)
    for sample, chosen in enumerate(routed.sets):
        expected = naive(library, base, chosen, x[sample : sample + 1])
        torch.testing.assert_close(routed.output[sample : sample + 1], expected, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        untouched = model.module(x)
    torch.testing.assert_close(untouched, base(x).detach())
    materialised = composition.materialized(model.composer.tensors)
    for way in (composition, materialised):
        with applied(model.module, way) as read, torch.no_grad():
            found = model.module(x)
        assert not read
        torch.testing.assert_close(found, naive(library, base, frozenset(TASKS[:top]), x), atol=2e-5, rtol=1e-4)


def test_routing_finds_the_subspace_a_patch_lies_in(tmp_path):
    base = network()
    library, _ = library_of(tmp_path, base, rank=2, tasks=TASKS[:3], energy=0.99999)
    model = AdaptiveModel(network(), library, layer="stem", source="base")
    for index, task in enumerate(library.experts):
        # An image whose patches are all one direction of the expert's kernel: window and image coincide.
        direction = library.factors(task, "stem.weight").v[:, 0].float().view(1, 3, 3, 3)
        module = nn.Conv2d(3, 16, 3)
        z = pool_patches(module, direction, "mean")
        torch.testing.assert_close(z, direction.flatten(1))
        weights = model.router.weights({"stem": z})
        assert int(weights.argmax()) == index
    seen = capture(model.module, Inputs((torch.randn(4, 3, 12, 12),)), ["stem", "down"])
    assert [tuple(z.shape) for z in seen.inputs.values()] == [(4, 27), (4, 144)]
    assert seen.rows == 4 * 144
    scores = {score.layer for score in score_layers(model.module, library)}
    assert scores == {"stem", "down", "dilated", "point"}


def test_baselines_average_kernels(tmp_path):
    base = network()
    library, experts = library_of(tmp_path, base, rank=2, energy=0.9999999)
    heads = {task: {"weight": torch.randn(2, 24)} for task in TASKS}
    rest = Smile(network(), library, heads).rest
    mean = sum(experts[task]["down.weight"] for task in TASKS) / len(TASKS)
    torch.testing.assert_close(rest.whole["down.weight"], mean, atol=1e-5, rtol=0)


def test_unbatched_images_and_depthwise_routing_are_named(tmp_path):
    base = network()
    library, _ = library_of(tmp_path, base, tasks=TASKS[:2])
    model = AdaptiveModel(network(), library)
    with pytest.raises(InputError):
        model(torch.randn(3, 12, 12))
    with pytest.raises(InputError, match=r"'depthwise' is not a layer"):
        AdaptiveModel(network(), library, layer="depthwise")
