"""Baselines: each equals its formula, computed by hand."""

import pytest
import torch

from merganser.errors import InputError
from merganser.modules.activations import capture
from merganser.modules.inputs import Inputs
from merganser.routing.baselines import Oracle, Smile, Static, TwinMerging, WeMoE
from merganser.routing.composition import applied
from merganser.routing.routers import MlpRouter
from support.expert_nets import WIDTH, Encoder, heads_of, small_library

TASKS = ("a", "b", "c")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    base, library = small_library(tmp_path_factory.mktemp("baselines"), TASKS)
    return base, library, heads_of(TASKS)


@pytest.fixture
def x():
    return torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(2))


def run(state, x):
    module = Encoder().eval()
    module.load_state_dict(state)
    return module(x).detach()


def deltas(library, name):
    return [library.expert(task).read(name) - library.base.read(name) for task in TASKS]


def output(baseline, x):
    with torch.no_grad():
        return baseline.run(Inputs((x,)))[0]


def test_static_merges(built, x):
    base, library, heads = built
    torch.testing.assert_close(output(Static(*built), x), run(library.merge().state_dict(), x), atol=2e-5, rtol=1e-4)
    summed = {name: tensor + 0.4 * sum(deltas(library, name)) for name, tensor in base.state_dict().items()}
    arithmetic = Static(*built, method="task_arithmetic", scale=0.4)
    torch.testing.assert_close(output(arithmetic, x), run(summed, x), atol=2e-5, rtol=1e-4)
    free, told = arithmetic.predict(x), arithmetic.predict(x, "b")
    assert set(free.sets) == {frozenset(TASKS)}
    assert set(told.tasks) == {"b"}
    assert told.sets == free.sets
    assert torch.equal(arithmetic(x).logits, free.logits)
    logits = run(summed, x) @ heads["b"]["weight"].T + heads["b"]["bias"]
    assert torch.equal(told.classes, logits.argmax(1))
    with pytest.raises(InputError, match="known: task_arithmetic, tsv"):
        Static(*built, method="ties")


def test_the_oracle_is_the_expert(built, x):
    _, library, heads = built
    oracle = Oracle(*built)
    for task in TASKS:
        logits = run(library.expert(task).state_dict(), x) @ heads[task]["weight"].T + heads[task]["bias"]
        found = oracle.predict(x, task)
        assert torch.equal(found.classes, logits.argmax(1))
        assert set(found.sets) == {frozenset([task])}
    with pytest.raises(InputError, match="needs the task"):
        oracle.predict(x)


@pytest.mark.parametrize("top", [1, 2])
def test_smile_is_its_formula_token_by_token(built, x, top):
    base, library, _ = built
    smile = Smile(*built, top=top, gate_rank=1)
    captured = {}

    def keep(_, args, result):
        captured["x"], captured["y"] = args[0], result

    layer = base.blocks[0].up
    with torch.no_grad():
        # Hooks run in the order they are registered: this one sees the layer without its experts.
        handle = layer.register_forward_hook(keep)
        votes = smile.run(Inputs((x,)))[1]
        handle.remove()
        plain = captured["y"]
        token = captured["x"][1, 2]
        factors = [library.factors(task, "blocks.0.up.weight") for task in TASKS]
        scores = torch.stack([(f.v[:, :1].float().T @ token).norm() for f in factors])
        best = scores.topk(top)
        gates = torch.zeros(3).scatter(0, best.indices, best.values.softmax(0))
        expected = plain[1, 2].clone()
        for g, f, bias in zip(gates, factors, deltas(library, "blocks.0.up.bias"), strict=True):
            expected += g * (f.matrix().float() @ token + bias)
        mixed = smile.stacks["blocks.0.up"].mixed(token, gates)
    torch.testing.assert_close(plain[1, 2] + mixed, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(votes.sum(1), torch.ones(6))
    prediction = smile.predict(x)
    assert [next(iter(chosen)) for chosen in prediction.sets] == [TASKS[i] for i in votes.argmax(1).tolist()]


def test_wemoe_starts_as_task_arithmetic_and_lowers_entropy(built, x):
    wemoe = WeMoE(*built, scale=0.3)
    for gate in wemoe.gates.values():
        torch.nn.init.zeros_(gate[2].weight)
    arithmetic = Static(*built, method="task_arithmetic", scale=0.3)
    torch.testing.assert_close(output(wemoe, x), output(arithmetic, x), atol=2e-5, rtol=1e-4)
    assert set(wemoe.gates) == {"blocks.0", "blocks.1", "blocks.2"}

    def entropy():
        with torch.no_grad():
            logits = wemoe.heads.logits("c", output(wemoe, x)).log_softmax(1)
            return float(-(logits.exp() * logits).sum(1).mean())

    before = entropy()
    wemoe.fit({"c": [x]}, steps=10, learning_rate=1e-2)
    assert entropy() < before
    with pytest.raises(InputError, match="no layer for WeMoE"):
        WeMoE(*built, layers=[])


def test_wemoe_answers_with_the_head_that_most_gates_vote_for(built, x):
    wemoe = WeMoE(*built)
    for gate, task in zip(wemoe.gates.values(), (1, 1, 2), strict=True):
        torch.nn.init.zeros_(gate[2].weight)
        gate[2].bias.data = 0.3 * torch.nn.functional.one_hot(torch.tensor(task), 3).float()
    wemoe.gates["blocks.2"][2].bias.data *= 100
    votes = wemoe.run(Inputs((x,)))[1]
    torch.testing.assert_close(votes.sum(1), torch.ones(6))
    assert wemoe.predict(x).sets == (frozenset(["b"]),) * 6
    wemoe.gates["blocks.1"][2].bias.data = torch.tensor([0.1, 0.0, 0.0])
    assert wemoe.predict(x).sets == (frozenset(["c"]),) * 6


def test_twin_merging_with_a_sure_router_is_the_truncated_expert(built, x):
    base, library, _ = built
    support = {task: torch.randn(4, WIDTH) + index for index, task in enumerate(TASKS)}
    router = MlpRouter.fit("blocks.1.up", support, hidden=8, steps=5)
    twin = TwinMerging(*built, router=router, rank=WIDTH)
    with applied(base, twin.shared):
        seen = capture(base, Inputs((x,)), ["blocks.1.up"])
    weights = router.weights(seen.inputs)
    torch.testing.assert_close(twin.run(Inputs((x,)))[1], weights)

    class Sure:
        tasks, layers, source = TASKS, ("blocks.0.up",), "base"

        def weights(self, inputs):
            return torch.tensor([[0.0, 1.0, 0.0]]).expand(len(inputs["blocks.0.up"]), -1)

    sure = TwinMerging(*built, router=Sure(), rank=WIDTH)
    # At full rank shared + exclusive is the expert in linear layers; norms stay those of the shared expert.
    state = library.expert("b").state_dict() | {n: t for n, t in sure.shared.whole.items() if "norm" in n}
    torch.testing.assert_close(output(sure, x), run(state, x), atol=5e-5, rtol=1e-3)
    assert set(sure.predict(x).tasks) == {"b"}
    with pytest.raises(InputError, match="not the library's"):
        TwinMerging(*built, router=MlpRouter.fit("blocks.1.up", {"z": torch.ones(2, WIDTH)}, hidden=4, steps=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda built, x: Static(*built).predict(x, "bb"), "no expert 'bb'"),
        (lambda built, x: Oracle(*built).predict(x, "bb"), "no expert 'bb'"),
        (lambda built, x: Static(*built, score="logits"), "did you mean 'logit'"),
        (lambda built, x: WeMoE(*built, pooling="max"), "pooling 'max'; known: first, last, mean"),
        (lambda built, x: WeMoE(*built).fit({"bb": [x]}), "no expert 'bb'"),
        (lambda built, x: WeMoE(*built).fit({"b": []}), "no batch of 'b'"),
        (lambda built, x: Smile(*built, top=0), "top 0"),
        (lambda built, x: Smile(*built, gate_rank=-1), "gate_rank -1"),
        (lambda built, x: WeMoE(*built, layers=["blocks.0.up", "blocks.0.upp"]), "did you mean 'blocks.0.up'"),
        (lambda built, x: TwinMerging(*built, router=two_steps(), rank=-3), "rank -3"),
    ],
)
def test_names_and_numbers_that_cannot_be_are_refused(built, x, make, message):
    with pytest.raises(InputError, match=message):
        make(built, x)


def two_steps():
    return MlpRouter.fit("blocks.1.up", {task: torch.randn(2, WIDTH) for task in TASKS}, hidden=4, steps=2)


def test_fitting_gates_leaves_no_gradients_elsewhere(built, x):
    base, library, _ = built
    heads = {task: torch.nn.Linear(WIDTH, 3) for task in library.experts}
    model = WeMoE(base, library, heads).fit({"c": [x]}, steps=1)
    trained = {id(parameter) for parameter in model.gating.parameters()}
    assert [name for name, p in model.named_parameters() if p.grad is not None and id(p) not in trained] == []
