"""Counting: what is stored, what a request costs, and what the knobs do."""

import pytest
import torch

from benchmarks.adaptive_accounting import Cost, core_cost, cost_of_merging, measure, multiply_adds, stored
from merganser.routing.adaptive import AdaptiveModel
from support.expert_nets import WIDTH, heads_of, small_library

TASKS = ("a", "b", "c")
LAYER = "blocks.1.up"
LINEAR = 2 * WIDTH * WIDTH


@pytest.fixture
def model(tmp_path):
    base, library = small_library(tmp_path, TASKS)
    return AdaptiveModel(base, library, heads_of(TASKS), layer=LAYER, top=1)


def test_stored_numbers(model):
    found = stored(model.library, sum(p.numel() for p in model.heads.parameters()))
    vectors = 3 * (2 * WIDTH + 2 * WIDTH + WIDTH)
    assert found.base == found.trained == 6 * LINEAR + vectors
    assert set(found.experts.values()) == {6 * 2 * (3 * WIDTH + 1) + vectors}
    assert found.heads == (2 + 3 + 4) * (WIDTH + 1)
    assert found.relative == (found.base + 3 * found.experts["a"] + found.heads) / found.base
    assert found.relative_to_trained > 1


def test_a_request_is_counted_step_by_step(model):
    x = torch.randn(4, 5, WIDTH)
    cost = measure(model, x)
    rows = 20
    assert cost.forward == rows * 6 * LINEAR
    assert cost.first_pass == rows * 2 * LINEAR, "the pass ends before the layer it is routed at"
    assert cost.router == 4 * 3 * 2 * WIDTH
    sets = set(model.route(x).sets)
    whole = rows * 6 * LINEAR
    updates = rows * 6 * 2 * 3 * WIDTH
    assert cost.second_pass == whole + updates
    assert cost.switch == 0, "single experts as low-rank updates need no work"
    assert cost.ratio == (cost.first_pass + cost.router + cost.second_pass) / cost.forward
    assert sets == set(model.cache.kept)
    probed = measure(model.with_settings(per_batch=True, probes=1), x)
    assert probed.first_pass == 5 * 2 * LINEAR
    assert (cost + probed).forward == 2 * cost.forward
    assert Cost(1, 1, 1, 1, 2).ratio == 2


def test_the_switch_to_several_experts_is_counted(model):
    composer = model.composer
    composition = composer.compose(frozenset("ab"))
    assert composition.low_rank
    assert cost_of_merging(composer, composition) == 6 * (3 * WIDTH * 4 * 5 // 2 + 12 * 4**3)
    assert cost_of_merging(composer, composer.compose(frozenset("a"))) == 0
    plain = AdaptiveModel(model.module, model.library, layer=LAYER, merge={"orthogonalize": "none"}).composer
    assert cost_of_merging(plain, plain.compose(frozenset("ab"))) == 0


@pytest.mark.parametrize(("d", "m", "rank"), [(384, 384, 144), (1536, 384, 96)])
def test_a_core_costs_less_than_two_polar_factors(d, m, rank):
    polar = sum(side * rank * rank * 3 // 2 + 5 * rank**3 for side in (d, m))
    assert core_cost(d, m, rank) < polar


def test_many_rows_are_cheaper_materialised(model):
    x = torch.randn(40, 5, WIDTH)
    many = measure(model.with_settings(per_batch=True, probes=1), x)
    assert many.second_pass == many.forward
    assert many.switch == 6 * 2 * LINEAR
    assert multiply_adds(lambda: x @ torch.ones(WIDTH, 3))[1] == 200 * WIDTH * 3
