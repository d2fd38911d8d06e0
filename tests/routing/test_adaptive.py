"""Input-adaptive merging: exact where it can be, and the same however samples are grouped, batched or remembered."""

import itertools

import pytest
import torch
from torch import nn

from benchmarks.adaptive_accounting import measure
from merganser.errors import InputError
from merganser.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.baselines import Static
from merganser.routing.choices import Routing
from merganser.routing.composition import applied
from merganser.routing.routers import NearestNeighbour
from support.expert_nets import WIDTH, encoder, expert_of, heads_of, library_of

TASKS = ("a", "b", "c", "d")
LAYER = "blocks.1.up"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    base = encoder()
    experts = {task: expert_of(base, seed, rank=4) for seed, task in enumerate(TASKS, start=1)}
    return base, experts, library_of(tmp_path_factory.mktemp("adaptive"), base, experts, rank_fraction=0.25)


@pytest.fixture
def x():
    return torch.randn(12, 5, WIDTH, generator=torch.Generator().manual_seed(5))


def model_of(built, **options):
    base, _, library = built
    options = {"layer": LAYER} | options
    return AdaptiveModel(base, library, options.pop("heads", heads_of(TASKS)), **options)


def run_expert(state, x):
    module = encoder()
    module.load_state_dict(state)
    return module(x)


def only(task, size=1):
    chosen = frozenset([task] if isinstance(task, str) else task)
    weights = torch.tensor([[float(t in chosen) for t in TASKS]]) / len(chosen)
    return Routing(TASKS, weights, (chosen,), torch.tensor([False])).repeated(size)


@pytest.mark.parametrize("whole", [False, True])
def test_one_expert_at_full_rank_gives_its_logits(tmp_path, x, whole):
    base = encoder()
    experts = {task: expert_of(base, seed, rank=None if whole else 4) for seed, task in enumerate("ab")}
    library = library_of(tmp_path, base, experts, rank_fraction=1.0 if whole else 0.25)
    kinds = set(library.expert("a").file.kinds.values())
    assert kinds == ({"full"} if whole else {"full", "factors"})
    heads = heads_of("ab")
    model = AdaptiveModel(base, library, heads, layer=LAYER, top=1)
    prediction = model.predict(x)
    for sample, chosen in enumerate(prediction.sets):
        (task,) = chosen
        logits = run_expert(experts[task], x[sample : sample + 1]) @ heads[task]["weight"].T + heads[task]["bias"]
        own = [place for place, (owner, _) in enumerate(prediction.columns) if owner == task]
        torch.testing.assert_close(prediction.logits[sample, own], logits[0].detach(), atol=2e-5, rtol=1e-4)
        assert prediction.tasks[sample] == task
        assert prediction.classes[sample] == logits.argmax()
        others = [place for place in range(len(prediction.columns)) if place not in own]
        assert torch.isinf(prediction.logits[sample, others]).all()


@pytest.mark.parametrize(
    "parameters", [{}, {"orthogonalize": "none"}, {"scale": 0.7}, {"weight": 0.5}, {"orthogonalize": "whiten"}]
)
def test_a_set_is_the_librarys_merge(built, x, parameters):
    library = built[2]
    model = model_of(built, merge=parameters)
    for tasks in (["a"], ["b", "d"], ["c", "a", "b"], list(TASKS)):
        expected = run_expert(library.merge(tasks, **parameters).state_dict(), x)
        torch.testing.assert_close(
            model(x, routing=only(tasks, len(x))).output, expected.detach(), atol=2e-5, rtol=1e-4
        )


def test_low_rank_and_materialised_agree(built, x):
    model = model_of(built)
    for tasks in itertools.combinations(TASKS, 2):
        composition = model.composer.compose(frozenset(tasks))
        assert composition.low_rank
        built_up = composition.materialized(model.composer.tensors)
        assert not built_up.low_rank
        outputs = []
        for form in (composition, built_up):
            with applied(model.module, form):
                outputs.append(model.module(x).detach())
        torch.testing.assert_close(*outputs, atol=2e-5, rtol=1e-4)


def test_the_module_is_left_as_it_was(built, x):
    base = built[0]
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    parameters = {name: id(parameter) for name, parameter in base.named_parameters()}
    model = model_of(built)
    model.predict(x)
    with pytest.raises(InputError, match="does not accept a tensor of shape"):
        model.predict(x[..., :3])
    assert parameters == {name: id(parameter) for name, parameter in base.named_parameters()}
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in base.modules())


class Training(nn.Module):
    """Dropout and running statistics, which a pass in training mode draws and changes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


@pytest.mark.parametrize("source", ["fixed", "base"])
def test_a_module_in_training_answers_as_in_evaluation(tmp_path, source):
    torch.manual_seed(0)
    base = Training()
    experts = {
        t: {n: v + (0.3 * torch.randn(v.shape) if v.dim() else 0) for n, v in base.state_dict().items()} for t in "ab"
    }
    library = library_of(tmp_path, base, experts, rank_fraction=0.25)
    x = torch.randn(6, WIDTH)
    model = AdaptiveModel(base, library, heads_of("ab"), layer="second", source=source)
    baseline = Static(base, library, heads_of("ab"))
    base.eval()
    expected = model.predict(x).scores, baseline.predict(x).scores, measure(model, x).forward
    base.train()
    base.dropout.eval()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    torch.testing.assert_close(model.predict(x).scores, expected[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(baseline.predict(x).scores, expected[1])
    assert measure(model, x).forward == expected[2]
    with model.using("a") as module:
        assert not module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert base.training
    assert base.norm.training
    assert not base.dropout.training


def test_grouping_batching_and_caching_change_nothing(built, x):
    whole = model_of(built).predict(x)
    assert len(set(whole.sets)) > 1, "the batch should mix sets"
    fresh = model_of(built, cache_bytes=0)
    for sample in range(len(x)):
        alone = fresh.predict(x[sample : sample + 1])
        assert alone.sets[0] == whole.sets[sample]
        assert (alone.tasks[0], int(alone.classes[0])) == (whole.tasks[sample], int(whole.classes[sample]))
        torch.testing.assert_close(alone.scores[0], whole.scores[sample], atol=2e-5, rtol=1e-4)
    assert len(fresh.cache) == 0
    again = model_of(built, cache_bytes=10**6)
    first = again.predict(x)
    for _ in range(4):  # often enough for sets to be materialised
        later = again.predict(x)
    assert any(not kept.low_rank for kept in again.cache.kept.values())
    torch.testing.assert_close(first.scores, later.scores, atol=2e-5, rtol=1e-4)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    shuffled = again.predict(x[order])
    torch.testing.assert_close(shuffled.scores, whole.scores[order], atol=2e-5, rtol=1e-4)


def test_thresholds_and_top(built, x):
    everything = model_of(built, threshold=0.0, top=len(TASKS)).route(x)
    assert set(everything.sets) == {frozenset(TASKS)}
    best = model_of(built, threshold=1.0).route(x)
    assert best.fallback.all()
    assert all(len(chosen) == 1 for chosen in best.sets)
    one = model_of(built, threshold=0.0, top=1).route(x)
    assert one.sets == best.sets
    for bad in ({"threshold": 1.5}, {"top": 0}, {"probes": 0, "per_batch": True}, {"probes": 2}, {"score": "loudest"}):
        with pytest.raises(InputError):
            model_of(built, **bad)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"normalize": "zscores"}, "did you mean 'zscore'"),
        ({"source": "bse"}, "did you mean 'base'"),
        ({"pooling": "max"}, "pooling 'max'; known: first, last, mean"),
        ({"score": "logits"}, "did you mean 'logit'"),
        ({"merge": {"scal": 2.0}}, "did you mean 'scale'"),
    ],
)
def test_misspelt_names_are_refused_at_once(built, option, message):
    with pytest.raises(InputError, match=message):
        model_of(built, **option)


def test_without_settings_the_threshold_and_the_number_of_tasks_have_an_effect(built, x):
    base, _, library = built
    sizes = {len(chosen) for chosen in AdaptiveModel(base, library).route(x).sets}
    assert max(sizes) > 1
    assert {len(chosen) for chosen in AdaptiveModel(base, library, top=1).route(x).sets} == {1}
    everyone = AdaptiveModel(base, library, threshold=0.01, top=len(TASKS)).route(x)
    assert len(set(everyone.sets)) < len(x)
    assert sum(map(len, everyone.sets)) > sum(len(c) for c in AdaptiveModel(base, library).route(x).sets)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(0, 5, WIDTH), "the batch has 0 samples"),
        (torch.zeros(WIDTH), "not samples × width: a batch of one sample"),
        (
            (torch.zeros(2, 5, WIDTH), torch.zeros(2), torch.zeros(2)),
            "does not accept these inputs .* leave out targets",
        ),
        ({"y": torch.zeros(2, 5, WIDTH)}, "does not accept these inputs"),
    ],
)
def test_batches_that_are_none_are_refused(built, batch, message):
    model = model_of(built)
    for ask in (model.route, model.predict, model, Static(*built[::2], heads_of(TASKS)).predict):
        if isinstance(getattr(ask, "__self__", None), Static) and isinstance(batch, torch.Tensor) and batch.dim() == 1:
            continue  # nothing looks at a layer's input there
        with pytest.raises(InputError, match=message):
            ask(batch)


def test_a_router_has_to_fit_however_it_comes(built, x):
    base, _, library = built
    model = model_of(built)
    support = {task: torch.randn(3, WIDTH) for task in TASKS}
    for router, message in (
        (NearestNeighbour.fit("blocks.1.upp", support), "reads 'blocks.1.upp'.*did you mean 'blocks.1.up'"),
        (NearestNeighbour.fit(LAYER, support | {"z": torch.ones(1, WIDTH)}), "built for 'z'"),
        (NearestNeighbour.fit(LAYER, {t: z[:, :3] for t, z in support.items()}), r"widths \{'blocks.1.up': 16\}"),
        (NearestNeighbour((), LAYER, ()), "at least one task"),
    ):
        with pytest.raises(InputError, match=message):
            model.with_router(router)
        with pytest.raises(InputError, match=message):
            AdaptiveModel(base, library, router=router)
    fitting = NearestNeighbour.fit(LAYER, support)
    assert len(model.with_router(fitting).route(x).sets) == len(x)
    for option in ({"layer": "nonsense"}, {"source": "fixed"}, {"normalize": "softmax"}):
        with pytest.raises(InputError, match=f"{next(iter(option))} .*: the router has its own"):
            AdaptiveModel(base, library, router=fitting, **option)
    with pytest.raises(InputError, match="no expert 'e'"):
        model.with_accepted(["a", "e"])
    with pytest.raises(InputError, match="did you mean 'blocks.1.up'"):
        model.first_pass(Inputs((x,)), ["blocks.1.upp"])


@pytest.mark.parametrize("options", [{}, {"per_batch": True}, {"score": "posterior"}])
def test_a_task_that_is_told_answers_with_its_head(built, x, options):
    model = model_of(built, **options)
    free, told = model.predict(x), model.predict(x, "c")
    assert set(told.tasks) == {"c"}
    assert told.sets == free.sets
    assert torch.equal(told.weights, free.weights)
    assert torch.equal(told.classes, model.heads.logits("c", model(x).output).argmax(1))
    with pytest.raises(InputError, match="no expert 'cc' in the library"):
        model.predict(x, "cc")


def test_a_given_routing_has_to_fit_the_batch(built, x):
    with pytest.raises(InputError, match="a routing of 3 samples for a batch of 12"):
        model_of(built)(x, routing=only("a", 3))
    apart = model_of(built).route(x)
    with pytest.raises(InputError, match="routed separately"):
        model_of(built, per_batch=True).predict(x, routing=apart)


def test_a_batch_gets_one_set_from_a_few_probes(built, x):
    model = model_of(built, per_batch=True, probes=3)
    routing = model.route(x)
    assert len(set(routing.sets)) == 1
    assert len(routing.sets) == len(x)
    residuals = model.router.residuals(model.first_pass(Inputs((x,))).inputs)
    assert residuals.shape == (3, len(TASKS))
    softmax = model_of(built, per_batch=True, probes=3, normalize="softmax")
    torch.testing.assert_close(softmax.route(x).weights[0], (-residuals.mean(0)).softmax(0))
    assert len(model.predict(x).tasks) == len(x)


def test_without_heads_the_output_and_the_sets(built, x):
    model = model_of(built, heads=None)
    routed = model(x)
    for tasks, index in routed.routing.groups().items():
        expected = model(x[index], routing=only(tasks, len(index))).output
        torch.testing.assert_close(routed.output[index], expected, atol=2e-5, rtol=1e-4)
    with pytest.raises(InputError, match="has no heads"):
        model.predict(x)
    with model.using(["b"]) as module:
        output = module(x)
        with pytest.raises(InputError, match="another set"):
            model(x)
    torch.testing.assert_close(output, model(x, routing=only("b", len(x))).output, atol=2e-5, rtol=1e-4)
    with pytest.raises(InputError, match="no expert 'e'"), model.using(["e"]):
        pass


def test_one_expert_alone(tmp_path, x):
    base = encoder()
    experts = {"only": expert_of(base, 1, rank=4)}
    library = library_of(tmp_path, base, experts, rank_fraction=0.25)
    model = AdaptiveModel(base, library, heads_of(["only"]))
    prediction = model(x)
    assert set(prediction.sets) == {frozenset(["only"])}
    torch.testing.assert_close(prediction.weights, torch.ones(len(x), 1, dtype=torch.float64))


def test_an_input_that_fits_no_task(built):
    """z = 0 leaves all residuals equal: no task stands out, the first is taken, and the routing says so."""
    silent = torch.zeros(2, 5, WIDTH)
    model = model_of(built, layer="blocks.0.up", source="base", threshold=0.3)
    routing = model.route(silent)
    torch.testing.assert_close(routing.weights, torch.full((2, 4), 0.25, dtype=torch.float64))
    assert routing.fallback.all()
    assert set(routing.sets) == {frozenset("a")}
    assert torch.isfinite(model.predict(silent).scores).all()


def test_tensors_that_are_no_matrices_belong_to_the_expert(tmp_path, x):
    base = encoder()
    state = base.state_dict()
    norms = {n: t + 0.5 if "norm" in n or n.endswith("bias") else t for n, t in state.items()}
    matrices = expert_of(base, 3, rank=2)
    library = library_of(tmp_path, base, {"norms": norms, "matrices": matrices}, rank_fraction=0.25)
    model = AdaptiveModel(base, library, layer=LAYER)
    routing = Routing(("norms", "matrices"), torch.ones(1, 2), (frozenset(["norms"]),), torch.tensor([False]))
    torch.testing.assert_close(model(x, routing=routing.repeated(len(x))).output, run_expert(norms, x).detach())


def test_modules_that_do_not_fit_are_refused(built):
    base, _, library = built
    with pytest.raises(InputError, match="no tensor 'blocks.0.norm.weight'"):
        AdaptiveModel(nn.Sequential(base), library)
    other = encoder(seed=3)
    with pytest.raises(InputError, match="is not the base's"):
        AdaptiveModel(other, library, layer=LAYER)
    AdaptiveModel(other, library, layer=LAYER, load_base=True)
    assert all(torch.equal(t, base.state_dict()[n]) for n, t in other.state_dict().items())
    with pytest.raises(InputError, match="did you mean 'blocks.1.up'"):
        model_of(built, layer="blocks.1.upp")
    with pytest.raises(InputError, match="expert 'd' has no head"):
        model_of(built, heads=heads_of("abc"))
    with pytest.raises(InputError, match="no such expert; known"):
        model_of(built, heads=heads_of("abcdz"))


def test_tied_weights_change_together(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.mix = nn.Linear(8, 8)
            self.out = nn.Linear(8, 11, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.mix(self.embed(ids)).mean(1))

    torch.manual_seed(0)
    base = Tied().eval()
    state = {n: t.clone() for n, t in base.state_dict().items() if n != "out.weight"}
    moved = {n: t + torch.randn(t.shape) for n, t in state.items()}
    library = Library.build(state, {"a": moved}, tmp_path / "lib", rank_fraction=1.0)
    model = AdaptiveModel(base, library, layer="mix")
    ids = torch.arange(6).reshape(2, 3)
    expected = moved["embed.weight"][ids] @ moved["mix.weight"].T + moved["mix.bias"]
    torch.testing.assert_close(model(ids).output, expected.mean(1) @ moved["embed.weight"].T)


def test_answers_from_a_pass_that_was_made(built, x):
    model = model_of(built)
    routed = model(x)
    for score in ("logit", "probability", "posterior"):
        again = model.answer(x, routed, score=score)
        direct = model.with_settings(score=score).predict(x, routing=routed.routing)
        assert torch.equal(again.logits, direct.logits)
        assert again.tasks == direct.tasks
    shared = model.with_heads(dict.fromkeys(TASKS, heads_of("a")["a"]))
    assert {owner for owner, _ in shared.answer(x, routed).columns} == {"a"}
    with pytest.raises(InputError, match="has no heads"):
        model_of(built, heads=None).answer(x, routed)
