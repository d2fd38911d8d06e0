"""Linear layers are used in more ways than by a call: whatever the way, the experts are in force."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.errors import InputError
from merganser.modules.activations import linear_layers
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.baselines import Oracle, Smile, Static, TwinMerging, WeMoE
from merganser.routing.choices import Routing
from support.expert_nets import expert_of, heads_of, library_of

TASKS = ("a", "b")
WIDTH = 16


class Called(nn.Module):
    """samples × tokens × 8 to samples × 16."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.middle = nn.Linear(32, 32)
        self.last = nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.last(self.inner(self.first(x).tanh())).mean(1)

    def inner(self, x):
        return self.middle(x).tanh()


class Transformer(Called):
    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.middle = nn.TransformerEncoder(block, 2)

    def inner(self, x):
        return self.middle(x)


class Padded(Transformer):
    """The fused kernel packs samples and leaves padded positions at zero."""

    def inner(self, x):
        padding = torch.arange(5)[None] >= torch.full((len(x), 1), 3)
        return self.middle(x, src_key_padding_mask=padding)


class Functional(Called):
    def inner(self, x):
        return F.linear(x, self.middle.weight, self.middle.bias).tanh()


class ByKeyword(Called):
    def inner(self, x):
        return self.middle(input=x).tanh()


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Subclass(Called):
    def __init__(self):
        super().__init__()
        self.middle = Scaled(32, 32)


class Patched(Called):
    def __init__(self):
        super().__init__()
        self.middle.forward = lambda x: F.linear(x, 2 * self.middle.weight)


class Shared(Called):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.again = self.middle

    def inner(self, x):
        return self.again(self.middle(x).tanh())


class Sometimes(Called):
    """A layer that only some passes reach."""

    reached = False

    def inner(self, x):
        return self.branch(x).tanh() if self.reached else x

    def branch(self, x):
        return self.middle(x)


class SometimesRead(Sometimes):
    def branch(self, x):
        return F.linear(x, self.middle.weight, self.middle.bias)


class ThereAndBack(Called):
    """A weight that is read after its layer was called."""

    def inner(self, x):
        return (self.middle(x).tanh() @ self.middle.weight).tanh()


class Looks(Called):
    """A look at a weight before the call, as in T5."""

    def inner(self, x):
        return self.middle(x.to(self.middle.weight.dtype)).tanh()


WAYS = [
    Called,
    Transformer,
    Padded,
    Functional,
    ByKeyword,
    Subclass,
    Patched,
    Shared,
    Sometimes,
    SometimesRead,
    ThereAndBack,
    Looks,
]


def build(path, way):
    torch.manual_seed(0)
    base = way().eval()
    experts = {task: expert_of(base, seed, rank=2) for seed, task in enumerate(TASKS, start=1)}
    if way is Shared:
        experts = {t: s | {f"again.{k}": s[f"middle.{k}"] for k in ("weight", "bias")} for t, s in experts.items()}
    return base, library_of(path, base, experts, rank_fraction=0.0625)


def loaded(base, state):
    """What the network computes with the weights loaded the ordinary way."""
    module = type(base)().eval()
    module.load_state_dict(state)
    return module


def sample():
    return torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(3))


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_set_is_in_force_however_layers_are_used(way, tmp_path):
    base, library = build(tmp_path, way)
    x, before = sample(), copy.deepcopy(base.state_dict())
    model = AdaptiveModel(base, library, layer="first")
    alone = {task: loaded(base, library.expert(task).state_dict())(x) for task in TASKS}
    both = loaded(base, library.merge(list(TASKS)).state_dict())(x)
    assert (alone["a"] - base(x)).abs().max() > 0.01
    # Before any pass has shown which layers are called …
    with model.using(["a"]) as module:
        close(module(x), alone["a"])
    mixed = Routing(
        TASKS,
        torch.full((6, 2), 0.5),
        tuple(map(frozenset, ("a", "b", "ab", "a", "b", "ab"))),
        torch.zeros(6, dtype=torch.bool),
    )
    fresh = model.with_cache()
    for _ in range(2):  # … in the pass that shows it, and after it
        found = fresh(x, routing=mixed).output
        for chosen, expected in ((0, alone["a"]), (1, alone["b"]), (2, both)):
            close(found[chosen::3], expected[chosen::3])
    assert {tuple(routing) for routing in map(sorted, model(x).sets)} <= {("a",), ("b",), ("a", "b")}
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


def test_layers_that_are_called_keep_low_rank_updates(tmp_path):
    base, library = build(tmp_path, Functional)
    model = AdaptiveModel(base, library, layer="first")
    one = frozenset("a")
    assert set(model.composer.compose(one).low_rank) == {"first.weight", "middle.weight", "last.weight"}
    model(sample(), routing=Routing(TASKS, torch.ones(1, 2), (one,), torch.tensor([False])).repeated(6))
    assert set(model.composer.compose(one).low_rank) == {"first.weight", "last.weight"}


@pytest.mark.parametrize("way", [Sometimes, SometimesRead])
@torch.no_grad()
def test_a_layer_that_a_pass_does_not_use_stays_as_it_was(way, tmp_path):
    base, library = build(tmp_path, way)
    x, heads, kept = sample(), heads_of(TASKS), {"first", "last"} | ({"middle"} if way is Sometimes else set())
    one = Routing(TASKS, torch.tensor([[0.0, 1.0]]), (frozenset("b"),), torch.tensor([False])).repeated(6)
    model = AdaptiveModel(base, library, layer="first")
    smile, wemoe = Smile(base, library, heads, top=2), WeMoE(base, library, heads, layers=[*linear_layers(base)])
    assert set(smile.stacks) == set(wemoe.stacks) == {"first", "middle", "last"}
    for asked in (lambda: model(x, routing=one), lambda: smile(x), lambda: wemoe(x)):
        asked()
    assert "middle.weight" in model.composer.compose(frozenset("b")).low_rank
    assert set(smile.stacks) == set(wemoe.stacks) == {"first", "middle", "last"}
    base.reached = True
    expert = loaded(base, library.expert("b").state_dict())
    expert.reached = True
    for _ in range(2):
        close(model(x, routing=one).output, expert(x))
    smile(x)
    wemoe(x)
    assert set(smile.stacks) == set(wemoe.stacks) == kept
    assert {f"{layer}.weight" for layer in kept} == set(model.composer.compose(frozenset("b")).low_rank)
    assert not any(type(part._parameters) is not dict for part in base.modules())


@pytest.mark.parametrize(
    ("way", "layers"),
    [
        (Called, {"first", "middle", "last"}),
        (Transformer, {"first", "last", *(f"middle.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2))}),
        (Subclass, {"first", "last"}),
        (Patched, {"first", "last"}),
        (Shared, {"first", "last"}),
    ],
)
def test_routing_is_offered_where_a_call_is_a_product(way, layers):
    assert set(linear_layers(way())) == layers


def test_the_default_layers_of_a_transformer_route(tmp_path):
    base, library = build(tmp_path, Padded)
    model = AdaptiveModel(base, library)
    assert model.router.layers == ("first", "middle.layers.0.linear1")
    assert len(model(sample()).sets) == 6
    assert base.middle.use_nested_tensor
    smile = Smile(base, library, heads_of(TASKS))
    assert len(smile.predict(sample()).tasks) == 6
    assert set(smile.stacks) == set(linear_layers(base))
    functional, library = build(tmp_path / "functional", Functional)
    with pytest.raises(InputError, match="'middle' is not called in the module's forward pass"):
        AdaptiveModel(functional, library, layer=["first", "middle"]).route(sample())


def averaged(library, scale, names):
    base = library.base
    deltas = {n: sum(library.expert(t).read(n) - base.read(n) for t in TASKS) for n in names}
    return {n: base.read(n) + scale * delta for n, delta in deltas.items()}


@pytest.mark.parametrize("way", [Transformer, Functional, ByKeyword, Subclass, Shared])
@torch.no_grad()
def test_gates_leave_other_layers_their_averages(way, tmp_path):
    """With a sure router Twin-Merging is the expert where layers are called, and the shared expert elsewhere; SMILE
    and WeMoE average what they cannot gate."""
    base, library = build(tmp_path, way)
    x, heads = sample(), heads_of(TASKS)
    called = {"first", "last"} | ({"middle"} if way is ByKeyword else set())
    called |= {f"middle.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)} if way is Transformer else set()
    theirs = {f"{layer}.{part}" for layer in called for part in ("weight", "bias")}
    rest = [name for name in base.state_dict() if name not in theirs]

    class Sure:
        tasks, layers, source = TASKS, ("first",), "base"

        def weights(self, inputs):
            return torch.tensor([[0.0, 1.0]]).expand(len(inputs["first"]), -1)

    expert = {name: library.expert("b").read(name) for name in base.state_dict()}
    twin = TwinMerging(base, library, heads, router=Sure(), rank=8)
    expected = loaded(base, expert | averaged(library, 0.3, rest))(x)
    for _ in range(2):
        close(twin.run(Inputs((x,)))[0], expected)
    close(
        Oracle(base, library, heads).predict(x, "b").scores,
        (loaded(base, expert)(x) @ heads["b"]["weight"].T + heads["b"]["bias"]).amax(1),
    )
    smile = Smile(base, library, heads, top=2)
    smile.run(Inputs((x,)))
    assert set(smile.stacks) == called
    assert set(smile.rest.whole) == set(rest)
    wemoe = WeMoE(base, library, heads, layers=[*linear_layers(base)])
    for gate in wemoe.gates.values():
        nn.init.zeros_(gate[2].weight)
    arithmetic = Static(base, library, heads, method="task_arithmetic")
    for _ in range(2):
        close(wemoe.run(Inputs((x,)))[0], arithmetic.run(Inputs((x,)))[0])
