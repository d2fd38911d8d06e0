"""Adaptive models and baselines are torch modules: state dicts, moves, modes, hooks and copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

from merganser.errors import InputError
from merganser.routing import AdaptiveModel, MlpRouter, Oracle, Prediction, Smile, Static, TwinMerging, WeMoE
from support.expert_nets import WIDTH, heads_of, small_library

TASKS = ("a", "b", "v1.5")
LAYER = "blocks.1.up"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return small_library(tmp_path_factory.mktemp("modules"), TASKS)


@pytest.fixture
def x():
    return torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(2))


def trained_router():
    support = {task: torch.randn(4, WIDTH) + index for index, task in enumerate(TASKS)}
    return MlpRouter.fit(LAYER, support, hidden=8, steps=5)


def models(built):
    base, library = built
    parts = copy.deepcopy(base), library, heads_of(TASKS)
    return {
        "adaptive": AdaptiveModel(*parts, layer=LAYER),
        "trained": AdaptiveModel(*parts, router=trained_router()),
        "static": Static(*parts),
        "arithmetic": Static(*parts, method="task_arithmetic"),
        "smile": Smile(*parts),
        "wemoe": WeMoE(*parts),
        "twin": TwinMerging(*parts, router=trained_router()),
        "oracle": Oracle(*parts),
    }


KINDS = ("adaptive", "trained", "static", "arithmetic", "smile", "wemoe", "twin", "oracle")


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_one_answer(built, x, kind):
    model = models(built)[kind]
    answer = model(x, task="b")
    assert isinstance(answer, Prediction)
    logits, tasks, sets, *_ = answer
    assert tasks == ("b",) * 6
    assert len(sets) == 6
    assert logits.shape == (6, len(answer.columns))
    assert not logits.requires_grad
    assert torch.equal(answer.scores, logits.amax(1))
    assert answer.weights.shape == (6, 3)
    again = model.predict((x,), "b")
    assert torch.equal(again.logits, logits)
    with pytest.raises(TypeError):
        model(x, x)


@pytest.mark.parametrize("kind", KINDS)
def test_moves_and_casts_reach_everything(built, x, kind):
    model = models(built)[kind]
    first = model(x, task="a").logits
    assert model.to(torch.float64) is model
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    wide = model(x.double(), task="a")
    assert wide.output.dtype == torch.float64
    torch.testing.assert_close(wide.logits, first, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.float()(x, task="a").logits, first, atol=2e-5, rtol=1e-4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta")
    with pytest.raises(InputError, match="on the meta device and has no values"):
        model(x, task="a")
    model.to_empty(device="cpu").load_state_dict(state)
    torch.testing.assert_close(model(x, task="a").logits, first, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_dict_is_the_base_the_heads_and_what_was_trained(built, x, kind):
    model, other = models(built)[kind], models(built)[kind]
    state = model.state_dict()
    rest = {name for name in state if not name.startswith("module.")}
    assert {name.removeprefix("module.") for name in state} - rest == set(built[0].state_dict())
    heads = {f"heads.{task}.{part}" for task in ("a", "b", "v1/5") for part in ("weight", "bias")}
    assert heads <= rest
    trained = {"trained": "router.network.", "twin": "router.network.", "wemoe": "gating.blocks/"}
    assert all(name.startswith(trained.get(kind, " ")) for name in rest - heads)
    assert (rest - heads != set()) == (kind in trained)
    state = {name: t + torch.randn(t.shape) if name in rest else t.clone() for name, t in state.items()}
    model.load_state_dict(state)
    assert not torch.equal(model(x, task="b").logits, other(x, task="b").logits)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x, task="b").logits, model(x, task="b").logits)
    state["module.blocks.0.up.weight"] += 1
    with pytest.raises(InputError, match=r"'blocks.0.up.weight' of the module is not the base's"):
        model.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_shares_the_library_alone(built, x, kind):
    model = models(built)[kind]
    first = model(x, task="b").logits
    other = copy.deepcopy(model)
    assert other.library is model.library
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    assert torch.equal(other(x, task="b").logits, first)
    other.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model(x, task="b").logits, first)
    torch.testing.assert_close(other(x.double(), task="b").logits, first, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_in_evaluation_mode_and_leaves_the_mode(built, x, kind):
    model = models(built)[kind]
    first = model.eval()(x, task="a").logits
    assert not any(part.training for part in model.modules())
    model.train()
    assert torch.equal(model(x, task="a").logits, first)
    assert all(part.training for part in model.modules())


def test_hooks_see_calls_and_modules_nest(built, x):
    model = models(built)["adaptive"]
    seen = []
    handle = model.register_forward_hook(lambda model, args, answer: seen.append((args[0].shape, answer.tasks)))
    answer = model(x)
    handle.remove()
    assert seen == [(x.shape, answer.tasks)]
    nested = nn.ModuleDict({"router": model})
    assert any(name == "router.heads.a.weight" for name in nested.state_dict())
    nested.double()
    assert model(x.double()).output.dtype == torch.float64


def test_models_that_share_a_module_have_parts_of_their_own(built, x):
    model = models(built)["adaptive"]
    first = model(x)
    heads, router = model.heads, model.router
    negated = {task: {part: -tensor for part, tensor in head.items()} for task, head in heads_of(TASKS).items()}
    other = model.with_heads(negated).with_router(trained_router())
    other.register_forward_hook(lambda *_: pytest.fail("the hook of another model"))
    assert model.heads is heads
    assert model.router is router
    assert not [name for name, _ in model.named_parameters() if name.startswith("router")]
    assert [name for name, _ in other.named_parameters() if name.startswith("router")]
    assert other.with_router(router).router is router
    assert torch.equal(model(x).logits, first.logits)
    quiet = model.with_settings(top=1)
    quiet.double()  # the module is one: all of them follow
    torch.testing.assert_close(model(x.double()).logits, first.logits, atol=1e-4, rtol=1e-4)


def test_a_module_that_is_moved_by_itself_is_followed(built, x):
    base, library = built
    model = AdaptiveModel(copy.deepcopy(base), library, layer=LAYER)
    first = model(x).output
    model.module.double()
    torch.testing.assert_close(model(x.double()).output, first.double(), atol=1e-4, rtol=1e-4)


def test_without_heads_there_are_no_classes(built, x):
    base, library = built
    model = AdaptiveModel(base, library, layer=LAYER)
    answer = model(x)
    assert answer.logits is answer.output
    assert answer.tasks == tuple(TASKS[i] for i in answer.weights.argmax(1).tolist())
    with pytest.raises(InputError, match="no heads and so no classes"):
        _ = answer.classes
    with pytest.raises(InputError, match="has no heads"):
        model(x, task="a")


def test_a_module_without_values_is_refused(built):
    base, library = built
    with pytest.raises(InputError, match="on the meta device"):
        AdaptiveModel(copy.deepcopy(base).to("meta"), library, layer=LAYER, load_base=True)


def test_gradients_reach_the_gates_alone(built, x):
    wemoe = models(built)["wemoe"]
    before = {name: p.clone() for name, p in wemoe.named_parameters()}
    wemoe.fit({"a": [x]}, steps=2, learning_rate=1e-2)
    changed = {name.split(".")[0] for name, p in wemoe.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"gating"}


@pytest.mark.parametrize("kind", ["adaptive", "trained", "smile"])
def test_columns_do_not_depend_on_the_batch(built, x, kind):
    """So that the logits of several batches can be concatenated."""
    model = models(built)[kind]
    whole = model(x)
    assert {task for task, _ in whole.columns} == set(TASKS)
    alone = [model(row[None]) for row in x]
    assert all(answer.columns == whole.columns for answer in alone)
    together = torch.cat([answer.logits for answer in alone])
    assert together.shape == whole.logits.shape
    both = together.isfinite() & whole.logits.isfinite()
    torch.testing.assert_close(together[both], whole.logits[both], atol=1e-4, rtol=1e-4)


def test_a_head_of_another_width_is_named(built, x):
    base, library = built
    heads = heads_of(TASKS) | {"b": nn.Linear(WIDTH + 1, 2)}
    with pytest.raises(InputError, match=f"the head of 'b' does not accept features of shape .*{WIDTH}"):
        Static(copy.deepcopy(base), library, heads)(x)


def test_an_adaptive_model_can_be_pickled(built, x):
    model = models(built)["adaptive"]
    answer, again = model(x), pickle.loads(pickle.dumps(model))(x)
    assert again.sets == answer.sets
    torch.testing.assert_close(again.scores, answer.scores)
