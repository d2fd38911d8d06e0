"""Statistics on their way through recipes, the plan and the engine to the methods; data put through modules."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import merganser as mg
from merganser import recipes
from merganser.engine.blocks import BLOCK
from merganser.errors import CheckpointError, InputError, RecipeError
from merganser.tuning import adamerge, choose_scale, diagonal_fisher, greedy_soup, linear_grams
from merganser.tuning.statistics import Statistics


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


@pytest.fixture
def world():
    base = network(0)
    models = []
    for seed in (1, 2):
        model = copy.deepcopy(base)
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        models.append(model)
    torch.manual_seed(9)
    return base, models, [[torch.randn(8, 5) for _ in range(3)] for _ in models]


def test_fisher_merge_equals_the_formula(world):
    _, models, data = world
    stats = [diagonal_fisher(m, batches) for m, batches in zip(models, data, strict=True)]
    merged = mg.merge(models, method="fisher", statistics={"fisher": stats}, weight=[1.0, 2.0])
    assert merged.keys() == models[0].state_dict().keys()
    for name, tensor in merged.items():
        f = [w * s.tensors[name].double() for w, s in zip((1.0, 2.0), stats, strict=True)]
        x = [m.state_dict()[name].double() for m in models]
        expected = (f[0] * x[0] + f[1] * x[1]) / (f[0] + f[1])
        seen = f[0] + f[1] > 0
        assert torch.allclose(tensor.double()[seen], expected[seen], atol=1e-5)
        mean = (x[0] + 2 * x[1]) / 3
        assert torch.allclose(tensor.double()[~seen], mean[~seen], atol=1e-6)


def test_regmean_is_the_least_squares_fit(world):
    _, models, data = world
    grams = [linear_grams(m, batches) for m, batches in zip(models, data, strict=True)]
    merged = mg.merge(models, method="regmean", statistics={"gram": grams}, alpha=1.0)
    x = [torch.cat(batches).double().numpy() for batches in data]
    targets = [xi @ m[0].weight.detach().double().numpy().T for xi, m in zip(x, models, strict=True)]
    fitted = np.linalg.lstsq(np.concatenate(x), np.concatenate(targets), rcond=None)[0].T
    assert np.allclose(merged["0.weight"].numpy(), fitted, atol=1e-4)
    mean = (models[0][0].bias + models[1][0].bias) / 2
    assert torch.allclose(merged["0.bias"], mean, atol=1e-6)


def test_statistics_are_reused_without_the_data(world, checkpoint, tmp_path):
    _, models, data = world
    stats = [diagonal_fisher(m, batches) for m, batches in zip(models, data, strict=True)]
    expected = mg.merge(models, method="fisher", statistics={"fisher": stats})
    paths = [str(checkpoint(f"m{i}", m.state_dict())) for i, m in enumerate(models)]
    files = [str(s.save(tmp_path / f"f{i}.safetensors")) for i, s in enumerate(stats)]
    labelled = {"a": paths[0], "b": paths[1]}
    by_label = mg.merge(labelled, method="fisher", statistics={"fisher": {"b": files[1], "a": files[0]}})
    beside = {"method": "fisher", "models": [{"path": p, "fisher": f} for p, f in zip(paths, files, strict=True)]}
    at_top = {"method": "fisher", "models": paths, "statistics": {"fisher": files}}
    written = [mg.open(mg.run(d, tmp_path / f"out{i}")).state_dict() for i, d in enumerate((beside, at_top))]
    for made in (by_label, *written):
        for name, tensor in expected.items():
            assert torch.equal(made[name], tensor), name
    plan = recipes.plan(recipes.load(beside))
    assert plan.fingerprint() != recipes.plan(recipes.load({"method": "linear", "models": paths})).fingerprint()


def test_fisher_is_cut_like_the_tensor():
    torch.manual_seed(0)
    shape = (5, BLOCK // 2 + 3)
    models = [{"w": torch.randn(shape)} for _ in range(2)]
    fisher = [Statistics("fisher", {"w": torch.rand(shape)}, 1) for _ in range(2)]
    merged = mg.merge(models, method="fisher", statistics={"fisher": fisher}, workers=2)
    f, x = [s.tensors["w"].double() for s in fisher], [m["w"].double() for m in models]
    assert torch.allclose(merged["w"].double(), (f[0] * x[0] + f[1] * x[1]) / (f[0] + f[1]), atol=1e-5)


def test_gram_is_read_whole_also_when_nested(world, checkpoint, tmp_path):
    _, models, data = world
    paths = [str(checkpoint(f"m{i}", m.state_dict())) for i, m in enumerate(models)]
    grams = [linear_grams(m, b) for m, b in zip(models, data, strict=True)]
    files = [str(gram.save(tmp_path / f"g{i}.safetensors")) for i, gram in enumerate(grams)]
    inner = {"method": "regmean", "models": paths, "statistics": {"gram": files}}
    outer = {"method": "linear", "models": [inner, paths[0]]}
    made = mg.open(mg.run(outer, tmp_path / "out")).state_dict()
    expected = mg.merge(models, method="regmean", statistics={"gram": grams})
    for name, tensor in expected.items():
        assert torch.allclose(made[name], (tensor + models[0].state_dict()[name]) / 2, atol=1e-6)


def test_adamerge_leaves_its_inputs_as_they_are(world):
    base, models, data = world
    before = [p.clone() for m in (base, *models) for p in m.parameters()]
    merged, _ = adamerge(models, base, data, steps=3, learning_rate=0.1)
    assert merged.keys() == base.state_dict().keys()
    assert not torch.equal(merged["0.weight"], base.state_dict()["0.weight"])
    after = [p for m in (base, *models) for p in m.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_adamerge_of_the_parts_of_tsv(world):
    base, models, data = world
    start = mg.merge(models, "tsv", base)
    still, first = adamerge(models, base, data, parts="tsv", init=1.0, steps=0)
    assert all(torch.allclose(still[name], start[name], atol=1e-5) for name in start)
    heads = [nn.Identity()] * 2
    learned, last = adamerge(models, base, data, parts="tsv", init=1.0, steps=20, learning_rate=0.05, heads=heads)
    assert not torch.equal(learned["0.weight"], still["0.weight"])
    assert last.entropy_after < last.entropy_before == first.entropy_after
    with pytest.raises(InputError, match="unknown parts 'tvs'; did you mean 'tsv'"):
        adamerge(models, base, data, parts="tvs")


def test_methods_that_need_data_are_named_where_a_rule_is_expected(world):
    base, models, _ = world
    for method, function in (("adamerging", "mg.tuning.adamerge"), ("greedy_soup", "mg.tuning.greedy_soup")):
        with pytest.raises(RecipeError, match=f"{method!r} needs data.*; call {function}"):
            mg.merge(models, method, base)
        with pytest.raises(RecipeError, match=f"call {function}"):
            recipes.load({"method": method, "models": ["a", "b"]})
    for method, meant in (("greedy_sop", "greedy_soup"), ("ada_merging", "adamerging"), ("tise", "ties")):
        with pytest.raises(RecipeError, match=f"unknown method {method!r}; did you mean {meant!r}"):
            mg.merge(models, method, base)


@pytest.fixture
def labelled(world):
    """Batches on which each model is right: the merge has something to lose."""
    _, models, data = world
    return [[(x, m(x).argmax(1)) for x in batches] for m, batches in zip(models, data, strict=True)]


def mean_accuracy(module, labelled):
    def score(weights, budget=None):
        shares = []
        for batches in labelled:
            x, y = (torch.cat(parts) for parts in zip(*batches[:budget], strict=True))
            shares.append(float((functional_call(module, dict(weights), (x,)).argmax(1) == y).double().mean()))
        return sum(shares) / len(shares)

    return score


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv", "ties"])
def test_the_best_scale_by_data(world, labelled, method):
    base, models, _ = world
    score = mean_accuracy(base, labelled)
    alphas = [0.1, 1 / 3, 0.6, 1.0, 1.5]
    merged, search = choose_scale(models, method, base, data=labelled, alphas=alphas)
    scores = [score(mg.merge(models, method, base, scale=alpha)) for alpha in alphas]
    best = alphas[scores.index(max(scores))]
    expected = mg.merge(models, method, base, scale=best)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert float(search.best) == best
    assert list(search.rungs[0].scores.values()) == pytest.approx(scores)
    by_score, _ = choose_scale(models, method, base, score=score, alphas=alphas)
    assert all(torch.equal(by_score[name], expected[name]) for name in expected)


def test_the_scale_by_halving(world, labelled):
    base, models, _ = world
    named, data = dict(zip("ab", models, strict=True)), dict(zip("ab", labelled, strict=True))
    options = {"alphas": [0.2, 0.5, 0.8, 1.1], "budgets": [1, 3], "keep": 0.25}
    _, by_data = choose_scale(named, "task_arithmetic", base, data=data, **options)
    _, by_score = choose_scale(named, "task_arithmetic", base, score=mean_accuracy(base, labelled), **options)
    assert [(rung.budget, len(rung.scores)) for rung in by_data.rungs] == [(1, 4), (3, 1)]
    assert by_data == by_score


def test_greedy_soup_by_data_is_greedy_soup_by_its_accuracy(world, labelled, checkpoint):
    base, models, _ = world
    three, labelled = [*models, base], [*labelled, labelled[0]]
    expected, report = greedy_soup(three, score=mean_accuracy(base, labelled))
    by_data, same = greedy_soup(three, data=labelled)
    assert same == report
    paths = [str(checkpoint(f"m{i}", m.state_dict())) for i, m in enumerate(three)]
    from_files, _ = greedy_soup(paths, base=base, data=labelled, heads=[nn.Identity()] * 3)
    for name, tensor in expected.items():
        assert torch.equal(by_data[name], tensor)
        assert torch.equal(from_files[name], tensor)


def test_refusals_of_choices(world, labelled):
    base, models, data = world
    states = [m.state_dict() for m in models]
    for arguments, options, message in (
        ((models, "linear", base), {"data": labelled}, "'linear' has no scale"),
        ((models, "ties", None), {"data": labelled}, "give the base"),
        ((models, "ties", base), {"data": labelled, "scale": 2.0}, "either given or chosen"),
        ((models, "ties", base), {"data": labelled, "alphas": []}, "at least one"),
        ((models, "ties", base), {}, "either data, labelled batches for each model, or score"),
        ((models, "ties", base), {"data": labelled, "score": len}, "either data"),
        ((models, "ties", base), {"score": len, "heads": [nn.Identity()] * 2}, "heads are for accuracy on data"),
        ((states, "ties", states[0]), {"data": labelled}, "base: data can only be passed through a module"),
        ((models, "ties", base), {"data": data}, "data of '0': expected labelled batches"),
    ):
        with pytest.raises(InputError, match=message):
            choose_scale(*arguments, **options)
    less = {k: v for k, v in states[1].items() if k != "0.bias"}
    for arguments, options, message in (
        (models, {}, "either data, labelled batches for each model, or score"),
        (models, {"data": data}, "data of '0': expected labelled batches"),
        (states, {"data": labelled}, "base: data can only be passed through a module"),
        ("adir", {"score": len}, "expected a list or a mapping of models, got a single str"),
        ([states[0], less], {"score": len}, "'0.bias' is only in 0"),
        ([states[0], states[1] | {"0.bias": torch.ones(2)}], {"score": len}, r"shape \(7,\) in 0, \(2,\) in 1"),
    ):
        with pytest.raises(InputError, match=message):
            greedy_soup(arguments, **options)
    with pytest.raises(InputError, match="base: data can only be passed through a module"):
        adamerge(models, states[0], data)
    with pytest.raises(InputError, match="data: expected one for each of the models"):
        adamerge(models, base, data[:1])
    with pytest.raises(InputError, match="data: expected one for each of the models"):
        adamerge(models, base, {"a": data[0], "b": data[1]})


def test_refusals(world, checkpoint, tmp_path):
    _, models, data = world
    states = [m.state_dict() for m in models]
    stats = [diagonal_fisher(m, b) for m, b in zip(models, data, strict=True)]
    with pytest.raises(RecipeError, match="needs the fisher statistics of models\\[0\\]; write `fisher: path`"):
        mg.merge(states, method="fisher")
    with pytest.raises(InputError, match="1 values for 2 models"):
        mg.merge(states, method="fisher", statistics={"fisher": stats[:1]})
    with pytest.raises(RecipeError, match="unknown key or parameter 'fisher'"):
        mg.merge(states, method="linear", statistics={"fisher": stats})
    short = Statistics("fisher", {k: v for k, v in stats[1].tensors.items() if k != "0.bias"}, 1)
    with pytest.raises(CheckpointError, match="'0.bias' has fisher statistics of models\\[0\\], not of models\\[1\\]"):
        mg.merge(states, method="fisher", statistics={"fisher": [stats[0], short]})
    wrong = Statistics("fisher", stats[1].tensors | {"0.bias": torch.ones(2)}, 1)
    with pytest.raises(CheckpointError, match="expected \\[7\\]"):
        mg.merge(states, method="fisher", statistics={"fisher": [stats[0], wrong]})
    with pytest.raises(InputError, match=r"takes \(input\) and does not accept these inputs .* leave out targets"):
        linear_grams(models[0], [(x, x, x.argmax(1)) for x in data[0]])
    with pytest.raises(RecipeError, match="statistics.fisher: 1 paths for 2 models"):
        recipes.load({"method": "fisher", "models": ["a", "b"], "statistics": {"fisher": ["x"]}})
    with pytest.raises(RecipeError, match="unknown key 'fischer'; did you mean 'fisher'"):
        recipes.load({"method": "fisher", "models": ["a", "b"], "statistics": {"fischer": ["x", "y"]}})
    path = str(checkpoint("m", states[0]))
    with pytest.raises(CheckpointError, match="models\\[0\\].fisher: .*no such file"):
        recipes.plan(
            recipes.load({"method": "fisher", "models": [{"path": path, "fisher": str(tmp_path / "no.safetensors")}]})
        )


def test_data_with_nan_or_nothing_is_refused(world):
    base, models, data = world
    broken = [torch.full((4, 5), torch.nan)]
    for call in (
        lambda: diagonal_fisher(base, broken),
        lambda: linear_grams(base, broken),
        lambda: mg.tuning.regmean_pp(models, base, [broken, data[1]]),
        lambda: adamerge(models, base, [broken, data[1]], steps=1),
        lambda: mg.tuning.adarank(models, base, [broken, data[1]], steps=1),
    ):
        with pytest.raises(InputError, match="look for NaN or infinity"):
            call()
    with pytest.raises(InputError, match="no batch reached"):
        linear_grams(base, [torch.zeros(0, 5)])


@pytest.mark.parametrize("alphas", [0.5, ["x"], "12", None])
def test_scales_to_choose_from_are_numbers(world, labelled, alphas):
    base, models, _ = world
    with pytest.raises(InputError, match="alphas: expected a list of numbers"):
        choose_scale(models, "tsv", base, data=labelled, alphas=alphas)
