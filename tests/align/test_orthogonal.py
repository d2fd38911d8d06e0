"""Symmetries beyond permutations: derived and self-tested on small transformers, found again by matching."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from merganser.align import (
    Symmetry,
    choose_universe,
    match,
    match_to_reference,
    scramble,
    self_test,
    symmetry,
    universe,
)
from merganser.align.latents import LatentMaps
from merganser.align.permutations import apply, compose, identity, inverse, random
from merganser.align.state import states_of
from merganser.errors import InputError, MerganserError
from merganser.kernels.assignment import Node, assign_tree, centred_basis, rotate

X = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))


class LlamaNorm(nn.Module):
    """RMSNorm as models of transformers write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Transformer(nn.Module):
    """One pre-norm block; with `after`, its normalisation comes after the sum, as in the first transformers."""

    def __init__(self, norm: type[nn.Module], after: bool = False, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.after = heads, after
        self.embed, self.head = nn.Linear(6, width), nn.Linear(width, 3)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.n1, self.n2, self.n3 = norm(width), norm(width), norm(width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.after:
            x = self.n1(x + self.attend(x))
            return self.head(self.n2(x + self.down(self.up(x).relu())))
        x = x + self.attend(self.n1(x))
        x = x + self.down(self.up(self.n2(x)).relu())
        return self.head(self.n3(x).mean(1))


class Fused(Transformer):
    """Queries, keys and values from one projection: chunks (GPT-2), slices, or an axis of three (timm)."""

    def __init__(self, norm: type[nn.Module], cut: str) -> None:
        super().__init__(norm)
        del self.q, self.k, self.v
        self.qkv, self.cut = nn.Linear(8, 24), cut

    def attend(self, x: Tensor) -> Tensor:
        if self.cut == "chunk":
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        elif self.cut == "slice":
            whole = self.qkv(x)
            q, k, v = (whole[..., i : i + 8].unflatten(-1, (2, 4)).transpose(1, 2) for i in (0, 8, 16))
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Grouped(Transformer):
    """Two query heads for every head of keys and values."""

    def __init__(self) -> None:
        super().__init__(nn.RMSNorm, width=16, heads=4)
        self.k, self.v = nn.Linear(16, 8), nn.Linear(16, 8)

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (2, 1, 4)).expand(-1, -1, -1, 2, -1) for layer in (self.k, self.v))
        k, v = (each.flatten(2, 3).transpose(1, 2) for each in (k, v))
        return self.o(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def groups(found: Symmetry) -> list[str]:
    return sorted(atom.group for atom in found.atoms.values())


def network(norm: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = Transformer(norm).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize(
    ("norm", "group"), [(nn.LayerNorm, "centred"), (nn.RMSNorm, "orthogonal"), (LlamaNorm, "orthogonal")]
)
def test_residual_stream_and_heads_are_rotated(norm: type[nn.Module], group: str) -> None:
    net = network(norm)
    found = symmetry(net, X.double(), kind="orthogonal")  # self-tested in float64
    assert groups(found) == sorted([group, "orthogonal", "orthogonal", "permutation", "permutation"])
    canonical = found.canonical.of(net.state_dict())
    twin = scramble(net, found, seed=1)
    torch.testing.assert_close(twin(X.double()), net(X.double()), rtol=1e-9, atol=1e-9)
    assert all(torch.equal(canonical[f"n{i}.weight"], torch.ones(8).double()) for i in (1, 2, 3))
    left, right = (canonical[f"{name}.weight"].reshape(2, 4, -1) for name in "qk")
    bias_l, bias_r = (canonical[f"{name}.bias"].reshape(2, 4, 1) for name in "qk")
    gram = [torch.cat(pair, -1) @ torch.cat(pair, -1).mT for pair in ((left, bias_l), (right, bias_r))]
    torch.testing.assert_close(gram[0], gram[1])  # balanced
    for name, tensor in found.canonical.of(canonical).items():
        torch.testing.assert_close(tensor, canonical[name])
    assert Symmetry.from_json(found.to_json()) == found


@pytest.mark.parametrize("cut", ["chunk", "slice", "unbind"])
def test_heads_of_a_fused_projection_are_rotated(cut: str) -> None:
    found = symmetry(Fused(nn.RMSNorm, cut).double(), X.double(), kind="orthogonal")  # self-tested
    assert groups(found) == [*["orthogonal"] * 3, "permutation", "permutation"]


def test_a_damaged_canonical_form_is_refused() -> None:
    text = symmetry(network(nn.RMSNorm), X.double(), kind="orthogonal").to_json()
    with pytest.raises(InputError, match="names axis 0 of 'elsewhere'"):
        Symmetry.from_json(text.replace('"scale": "n1.weight"', '"scale": "elsewhere"'))
    with pytest.raises(InputError, match="unknown group"):
        Symmetry.from_json(text.replace('"orthogonal"]', '"unitary"]'))


def test_a_scale_that_cannot_be_folded_leaves_permutations() -> None:
    found = symmetry(Transformer(nn.LayerNorm, after=True), X, kind="orthogonal", allow_unused=True)
    stream = next(atom for atom in found.atoms.values() if atom.size == 8)
    assert stream.group == "permutation"


def test_a_wrong_rotation_fails_the_self_test() -> None:
    net = network(nn.LayerNorm)
    found = symmetry(net, X.double(), kind="orthogonal")
    text = found.to_json().replace('"centred"]', '"orthogonal"]', 1)
    with pytest.raises(MerganserError, match="failed its self-test"):
        self_test(net, Symmetry.from_json(text), X.double())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_planted_rotations_are_found(norm: type[nn.Module]) -> None:
    net = network(norm)
    found = symmetry(net, X.double(), kind="orthogonal")
    twin = scramble(net, found, seed=5)
    for method, options in (("weights", {}), ("activations", {"batches": [X.double()], "standardize": True})):
        matched = match(net, twin, found, method, **options)
        moved, wanted = matched.apply(twin), found.canonical.of(net.state_dict())
        for name, tensor in wanted.items():
            torch.testing.assert_close(moved[name], tensor, rtol=1e-5, atol=1e-5)


def test_rotations_inside_heads_that_share_keys_and_values_are_found() -> None:
    torch.manual_seed(0)
    net = Grouped().double()
    found = symmetry(net, X.double(), kind="orthogonal")
    assert any(len(found.ancestors(name)) and atom.group == "orthogonal" for name, atom in found.atoms.items())
    twin = scramble(net, found, seed=5)
    assert match(net, twin, found).optimal
    merged = Grouped().double()
    merged.load_state_dict(universe([net, twin], found).merged())
    torch.testing.assert_close(merged(X.double()), net(X.double()), rtol=1e-5, atol=1e-5)


def test_a_universe_of_rotated_copies_merges_to_the_same_function() -> None:
    net = network(nn.RMSNorm)
    found = symmetry(net, X.double(), kind="orthogonal")
    joined = universe([scramble(net, found, seed) for seed in range(3)], found)
    merged = network(nn.RMSNorm)
    merged.load_state_dict(joined.merged())
    torch.testing.assert_close(merged(X.double()), net(X.double()), rtol=1e-4, atol=1e-4)
    assert joined.cycle_error() < 1e-8


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_random_starts_take_rotations(norm: type[nn.Module]) -> None:
    """`choose_universe` uses them by default."""
    net = network(norm)
    found = symmetry(net, X.double(), kind="orthogonal")
    nets = [net, scramble(net, found, 1)]
    starts = [universe(nets, found, start="sinkhorn", seed=seed) for seed in (0, 0, 1)]
    assert starts[0].objective == starts[1].objective
    assert all(permutations.keys() == found.atoms.keys() for permutations in starts[2].permutations)
    merged = network(norm)

    def closeness(state: dict[str, Tensor]) -> float:
        merged.load_state_dict(state)
        with torch.no_grad():
            return -float((merged(X.double()) - net(X.double())).norm())

    choice = choose_universe(nets, found, closeness, tries=1)
    assert [each.name for each in choice.candidates][2] == "C²M³ from sinkhorn, seed 0"
    assert max(each.score for each in choice.candidates) > -1e-4


def test_orthogonal_maps_agree_more_than_permutations() -> None:
    nets = [network(nn.RMSNorm, seed) for seed in (0, 1)]
    wide = symmetry(nets[0], X.double(), kind="orthogonal")
    narrow = symmetry(nets[0], X.double())
    states = [wide.canonical.of(net.state_dict()) for net in nets]
    moved = [match_to_reference(states, known).to_universe(1) for known in (wide, narrow)]

    def agreement(state: dict[str, Tensor]) -> float:
        return sum(float((state[name] * states[0][name]).sum()) for name in wide.objective)

    assert agreement(moved[0]) > agreement(moved[1])


def test_the_group_laws_of_nested_rotations() -> None:
    found = symmetry(network(nn.LayerNorm), X.double(), kind="orthogonal")
    state = found.canonical.of(network(nn.LayerNorm).state_dict())
    p, q = random(found, 1), random(found, 2)
    both = apply(found, compose(found, p, q), state)
    for name, tensor in apply(found, q, apply(found, p, state)).items():
        torch.testing.assert_close(both[name], tensor)
    for name, tensor in apply(found, inverse(found, p), apply(found, p, state)).items():
        torch.testing.assert_close(tensor, state[name])
    rotated = next(name for name, atom in found.atoms.items() if atom.group != "permutation")
    with pytest.raises(InputError, match="not in its group"):
        apply(found, identity(found) | {rotated: 2 * identity(found)[rotated]}, state)


@pytest.mark.parametrize("group", ["orthogonal", "centred"])
def test_procrustes_beats_random_members_of_its_group(group: str) -> None:
    generator = np.random.default_rng(0)
    profit = generator.standard_normal((5, 5))
    best = rotate(profit, group)
    np.testing.assert_allclose(best @ best.T, np.eye(5), atol=1e-12)
    if group == "centred":
        np.testing.assert_allclose(best.sum(1), 1.0)
        np.testing.assert_allclose(centred_basis(5).T @ np.ones(5), 0.0, atol=1e-12)
    others = [rotate(generator.standard_normal((5, 5)), group) for _ in range(200)]
    assert all((profit * best).sum() >= (profit * other).sum() for other in others)


def test_nested_procrustes_by_brute_force() -> None:
    """Two heads of rotated units: both orders of the heads, the best rotation in each."""
    profit = np.random.default_rng(1).standard_normal((2, 3, 2, 3))
    solution, value = assign_tree(Node("h", 2, (Node("d", 3, (), "orthogonal"),)), {("h", "d"): profit})
    nuclear = [[np.linalg.svd(profit[new, :, old], compute_uv=False).sum() for old in range(2)] for new in range(2)]
    assert value == pytest.approx(max(nuclear[0][0] + nuclear[1][1], nuclear[0][1] + nuclear[1][0]))
    got = sum((profit[new, :, old] * solution["d"][new]).sum() for new, old in enumerate(solution["h"]))
    assert got == pytest.approx(value)


def test_the_loss_of_the_midpoint_is_differentiated_along_rotations() -> None:
    """Against a finite difference: the objective is linear in the midpoint, and one rotation moves along its group."""
    a, b = (Transformer(nn.RMSNorm) for _ in range(2))
    known = symmetry(a, X, kind="orthogonal")
    states = states_of([a, b], known)
    maps = LatentMaps(*states, known, identity(known), rate=0.0, steps=1)
    generator = torch.Generator().manual_seed(0)
    directions = {name: torch.randn(t.shape, generator=generator) for name, t in states[0].items()}

    def value(midpoint: dict[str, Tensor]) -> Tensor:
        return sum(((midpoint[n] * d).sum() for n, d in directions.items()), torch.zeros(()))

    path = ("embed",)
    maps.step(value(maps.midpoint()))
    gradient = maps._latent[path].grad
    assert gradient is not None
    assert torch.allclose(gradient, -gradient.T, atol=1e-5)  # at the identity: a direction of the group
    turn = torch.zeros(8, 8, dtype=torch.float64)
    turn[0, 1], turn[1, 0] = 1e-3, -1e-3
    ends = []
    for sign in (1.0, -1.0):
        moved = identity(known) | {"embed": torch.linalg.matrix_exp(sign * turn).numpy()}
        image = apply(known, moved, states[1])
        ends.append(value({name: 0.5 * (states[0][name].double() + image[name].double()) for name in image}))
    slope = float((ends[0] - ends[1]) / 2e-3)
    assert slope == pytest.approx(float(gradient[0, 1] - gradient[1, 0]), rel=1e-2)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_rotations_are_learned_from_the_loss_of_the_midpoint(norm: type[nn.Module]) -> None:
    """Two transformers of one task, seeds 1 and 2: the midpoint improves far beyond weight matching."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(128, 5, 6, generator=generator)
    labels = inputs.mean(1)[:, :3].argmax(1)
    networks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        network = Transformer(norm)
        optimiser = torch.optim.Adam(network.parameters(), 1e-2)
        for _ in range(60):
            optimiser.zero_grad()
            cross_entropy(network(inputs), labels).backward()
            optimiser.step()
        networks.append(network.eval())
    known = symmetry(networks[0], inputs[:2], kind="orthogonal")
    batches = [(inputs[i::2], labels[i::2]) for i in range(2)]
    found = match(*networks, known, "ste", batches=batches, loss=cross_entropy, epochs=20, learning_rate=0.1)
    losses = [step.loss for step in found.trace]
    assert min(losses) < 0.7 * losses[0]
    twin = Transformer(norm)
    twin.load_state_dict(found.apply(networks[1]))
    assert torch.allclose(twin(inputs), networks[1](inputs), atol=1e-4)
