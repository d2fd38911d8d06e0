"""Rules that are run compiled over the stored bytes give the bits that torch gives."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import merganser as mg
from merganser import recipes
from merganser.checkpoints.dtypes import Element
from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine import blocks, fused
from merganser.engine.compute import Arithmetic
from merganser.engine.execute import execute
from merganser.engine.modules import ModuleSink, ModuleTensors
from merganser.kernels import selection, tiles
from merganser.kernels.drops import drop_by_rank
from merganser.kernels.spheres import total
from merganser.methods.registry import parameters, registry

pytestmark = pytest.mark.skipif(tiles.library() is None, reason="the compiled runner was not built (no C compiler)")

#: Every method that works on entries, with parameters that lead through its branches.
METHODS = {name: rule for name, rule in registry().items() if rule.reach != "whole" and not rule.statistics}
METHODS.pop("passthrough")
METHODS.pop("pcb")  # takes exponentials, which processors round each in their way
CHOICES = {
    "density": st.sampled_from([0.0, 0.2, 0.5, 0.999, 1.0]),
    "gamma": st.sampled_from([0.0, 0.01, 0.3]),
    "epsilon": st.sampled_from([0.0, 1e-5, 0.15]),
    "weight": st.sampled_from([1.0, 0.4, -0.3, 2.5]),
    "scale": st.sampled_from([1.0, 0.7, -1.1]),
    "normalize": st.booleans(),
    "rescale": st.booleans(),
    "select_topk": st.sampled_from([0.1, 1.0]),
    "agree": st.integers(0, 3),
    "t": st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    "alpha": st.sampled_from([0.1, 0.5, 0.8]),
    "decay": st.sampled_from([0.3, 0.9]),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Zeros of both signs, subnormal numbers, ties, what overflows when it is added up.
ODD = (0.0, -0.0, 1e-8, -6e-8, 1e-41, 0.5, -0.5, 6e4, 3e38)


@pytest.fixture
def short_blocks(monkeypatch):
    """Tensors in blocks and spans that small ones have several of, and everything recorded."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 11)
    monkeypatch.setattr(blocks, "SPAN", 1 << 13)
    monkeypatch.setattr(fused, "WORTH", 0)
    monkeypatch.setattr(selection, "SMALL", 1 << 12)
    blocks.spans.cache_clear()
    yield
    blocks.spans.cache_clear()


@st.composite
def cases(draw):
    method = draw(st.sampled_from(sorted(METHODS)))
    rule = METHODS[method]
    known = parameters(rule)
    chosen = {
        name: draw(CHOICES[name]) for name in known if name in CHOICES and (known[name].required or draw(st.booleans()))
    }
    shape = draw(st.sampled_from([(3001,), (37, 41), (70, 129), (5, 40, 33), (1, 4096), (8, 3, 3, 70)]))
    low = max(1, rule.models[0])
    count = draw(st.integers(low, int(min(rule.models[1], 3)))) if low < min(rule.models[1], 3) else low
    with_base = rule.base == "required" or (rule.base == "optional" and draw(st.booleans()))
    if method == "slerp":
        count, with_base = (1, True) if with_base else (2, False)
    return method, chosen, shape, count, with_base, draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0, 3, 40]))


def make(shape, seed, odd, dtypes):
    """A base and models near it, some entries of which are odd."""
    numbers = np.random.default_rng(seed)
    base = numbers.standard_normal(shape) * 0.02
    found = []
    for number, dtype in enumerate(dtypes):
        values = base + (numbers.standard_normal(shape) * 2e-3 if number else 0)
        flat = values.reshape(-1)
        flat[numbers.integers(0, flat.size, odd)] = numbers.choice(ODD, odd)
        limit = torch.finfo(dtype).max
        found.append({"w": torch.tensor(values.clip(-limit, limit)).to(dtype)})
    return found


def merge(case, tensors, **options):
    method, chosen, _, count, with_base, seed, _ = case
    base, *models = tensors
    return mg.merge(models[:count], method, base=base if with_base else None, seed=seed % 7, **chosen, **options)["w"]


def both(case, tensors, monkeypatch, **options):
    """The result (or the message of the error) compiled and by torch."""
    found = []
    for runner in (tiles.library(), None):
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "library", lambda runner=runner: runner)
            try:
                found.append(merge(case, tensors, **options))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def assert_same_bits(one, two):
    if isinstance(one, str) or isinstance(two, str):
        assert one == two
    else:
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one.view(torch.uint8).numpy(), two.view(torch.uint8).numpy())


QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.usefixtures("short_blocks")
@QUICK
@given(
    cases(),
    st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    st.sampled_from([None, *DTYPES]),
    st.integers(1, 2),
)
def test_the_same_bits_for_any_rule_dtype_shape_and_chunking(monkeypatch, case, dtypes, dtype, workers):
    tensors = make(case[2], case[5], case[6], dtypes)
    assert_same_bits(*both(case, tensors, monkeypatch, dtype=dtype, workers=workers))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # angles between vectors that have none
@pytest.mark.usefixtures("short_blocks")
@settings(QUICK, max_examples=40)
@given(cases(), st.sampled_from(DTYPES), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans(), st.data())
def test_what_is_not_finite_is_refused_or_merged_as_torch_does(monkeypatch, case, dtype, value, allowed, data):
    tensors = make(case[2], case[5], 0, [dtype] * 4)
    tensors[data.draw(st.integers(0, 3))]["w"].view(-1)[data.draw(st.integers(0, math.prod(case[2]) - 1))] = value
    assert_same_bits(*both(case, tensors, monkeypatch, allow_nan=allowed))


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_rule_on_entries_is_recorded(method, monkeypatch):
    recorded = []
    record = fused.record

    def watched(function, group, stores=False):
        recorded.append((stores, record(function, group, stores) is not None))
        return record(function, group, stores)

    monkeypatch.setattr(fused, "record", watched)
    rule = METHODS[method]
    required = {name: 0.3 for name, parameter in parameters(rule).items() if parameter.required}
    count = int(min(rule.models[1], 3))
    case = (method, required, (64, 1024), count, rule.base == "required", 0, 0)
    merge(case, make(case[2], 0, 0, [torch.bfloat16] * 4))
    assert (True, True) in recorded
    assert (True, False) not in recorded


def test_small_tensors_are_not_recorded(monkeypatch):
    monkeypatch.setattr(fused, "record", lambda *args: pytest.fail("recorded"))
    mg.merge([{"w": torch.randn(8, 8)}, {"w": torch.randn(8, 8)}])


def store(recorded, a, b, block, out, dtype=None):
    addresses = fused.Addresses.of([StoredEntries.of(a), StoredEntries.of(b)], 0)
    return fused.store(recorded, addresses, block, StoredEntries.of(out), Element.of(dtype or out.dtype))


class TestRecording:
    """What a rule may do that a recording must not get wrong."""

    def recorded(self, function):
        return fused.record(
            function, {"name": "w", "models": 2, "base": False, "shape": (8, 8), "labels": ("a", "b")}, True
        )

    @pytest.mark.parametrize(
        "function",
        [
            lambda g: g.models[0] * g.models[1].mean(),
            lambda g: g.models[0] * len(g.models[1]),
            lambda g: g.models[0] * g.models[0].shape[0],
            lambda g: g.models[0] * g.offset,
            lambda g: g.models[0] * (1 if g.offset else 2),
            lambda g: g.models[0] if (g.models[0] >= 0).all() else g.models[1],
            lambda g: g.models[0] if g.models[0] == g.models[1] else g.models[1],
            lambda g: g.models[0] + torch.ones(8),
            lambda g: torch.stack(g.models).median(0).values,
            lambda g: g.models[0].sort().values,
            lambda g: 1 - g.models[0],
            lambda g: g.models[0].copy_(g.models[1]),
        ],
    )
    def test_what_needs_more_than_a_tile_is_left_to_torch(self, function):
        assert self.recorded(function) is None

    def test_operations_in_place_change_what_shares_the_tensor_and_nothing_else(self):
        def rule(group):
            first = group.models[0] * 2.0
            view, copy = first.view(-1), first.clone()
            view.add_(group.models[1])
            return first.sub_(copy)

        recorded = self.recorded(rule)
        a, b = torch.randn(100), torch.randn(100)
        out = torch.empty(100)
        whole = blocks.Piece(0, 1, 0, 100)
        assert store(recorded, a, b, whole, out)
        np.testing.assert_array_equal(out, (a * 2.0 + b) - a * 2.0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("start", [0, 1, 3])
    def test_results_in_a_wider_tensor_are_rounded_as_if_they_were_stored(self, dtype, start):
        recorded = self.recorded(lambda group: group.models[0] + group.models[1])
        bits = torch.arange(0, 1 << 16, 7, dtype=torch.int32)  # every exponent, both signs, subnormal numbers
        a = (bits << 16 | 0x7FFF).view(torch.float32)
        a = a[a.isfinite() & (a.abs() < torch.finfo(dtype).max)]
        b = torch.zeros_like(a)
        room = torch.full((len(a) + start + 1,), 7.0)
        whole = blocks.Piece(0, 1, 0, len(a))
        assert store(recorded, a, b, whole, room[start : start + len(a)], dtype)
        expected = (a + b).to(dtype).float()
        np.testing.assert_array_equal(room[start : start + len(a)].view(torch.int32), expected.view(torch.int32))
        assert room[:start].eq(7).all()
        assert room[-1] == 7, "nothing beside it is touched"
        a[5] = 2.0 * torch.finfo(torch.float16).max if dtype == torch.float16 else 3.4e38
        b[5] = a[5]
        assert not store(recorded, a, b, whole, room[start : start + len(a)], dtype), "torch says what is wrong"

    def test_sums_over_tiles_of_rows_are_left_to_torch(self):
        def surveyed(group):
            dropped = drop_by_rank(group.models[0], group.random_bits(0), np.zeros(8, np.int32), np.ones(8, np.float32))
            return [total(dropped)]

        fields = {"name": "w", "models": 1, "base": False, "shape": (8, 8), "labels": ("a",)}
        assert fused.record(surveyed, fields) is None

    def test_only_rules_that_do_not_ask_for_the_tensor_serve_others(self):
        assert not self.recorded(lambda g: g.models[0] + g.models[1]).specific
        assert self.recorded(lambda g: g.models[0] * g.shape[0]).specific
        assert self.recorded(lambda g: g.models[0] * len(g.name)).specific


def test_a_library_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(tiles, "VERSION", tiles.VERSION + 1)
    tiles.library.cache_clear()
    assert tiles.library() is None
    monkeypatch.undo()
    tiles.library.cache_clear()
    assert tiles.library() is not None


def test_a_source_that_is_also_the_target_is_not_overwritten_halfway(monkeypatch):
    """Where NaN is allowed, torch computes a tensor again from sources that must still be whole."""
    monkeypatch.setattr(fused, "WORTH", 0)
    module, other = torch.nn.Linear(64, 64, bias=False), torch.randn(64, 64)
    other[-1, -1] = math.nan
    wanted = (module.weight.detach() + other) / 2
    sources = {"a": mg.open(module), "b": mg.open({"weight": other})}
    merge = recipes.prepare(recipes.load({"method": "linear", "models": list(sources)}), open=sources.__getitem__)
    execute(merge, ModuleSink(ModuleTensors(module)), settings=Arithmetic(allow_nan=True))
    torch.testing.assert_close(module.weight.detach(), wanted, equal_nan=True)
