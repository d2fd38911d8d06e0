"""Cores: the merge of a set without touching the factors is TSV-Merge, and is refused where rounding would show."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merganser.kernels.polar import FLOAT32_LIMIT
from merganser.kernels.spectra import Factors
from merganser.methods.tsv import TSV, orthogonal_sum
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.composition import applied
from merganser.routing.cores import core_of
from support.expert_nets import WIDTH, encoder, expert_of, library_of


def orthonormal(rng, rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns, generator=rng, dtype=torch.float64)).Q


def factors_of(rng, d, m, rank):
    s = torch.rand(rank, generator=rng, dtype=torch.float64).sort(descending=True).values + 0.1
    return Factors(orthonormal(rng, d, rank), s, orthonormal(rng, m, rank))


@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from(["polar", "whiten", "none"]),
    st.floats(0.1, 2),
)
@settings(max_examples=40, deadline=None)
def test_a_core_between_the_factors_is_the_orthogonal_sum(seed, ranks, orthogonalize, scale):
    rng = torch.Generator().manual_seed(seed)
    factors = [factors_of(rng, 20, 14, rank) for rank in ranks]
    core, amplification = core_of(factors, TSV(orthogonalize=orthogonalize, scale=scale))
    expected = scale * orthogonal_sum(factors, orthogonalize, dtype=torch.float64)
    u, _, v = (torch.cat(part, dim=-1) for part in zip(*factors, strict=True))
    found = u @ (core if core.dim() == 2 else core.diag()) @ v.T
    torch.testing.assert_close(found, expected, atol=1e-9 * amplification, rtol=0)
    assert (core.dim() == 1) == (orthogonalize == "none" or len(ranks) == 1)


def test_identical_experts_are_counted_once():
    rng = torch.Generator().manual_seed(0)
    factors = factors_of(rng, 12, 9, 3)
    core, _ = core_of([factors, factors], TSV())
    u, v = (torch.cat([side, side], dim=1) for side in (factors.u, factors.v))
    torch.testing.assert_close(u @ core @ v.T, (factors.u * factors.s) @ factors.v.T, atol=1e-12, rtol=0)


def test_nearly_parallel_experts_are_merged_whole(tmp_path):
    """Between τ/10 and 1/FLOAT32_LIMIT small directions count, and a core would have to cancel digits to keep them."""
    base = encoder()
    first = expert_of(base, 1, rank=2)
    second = {
        name: tensor + (1e-3 * torch.randn(tensor.shape) if tensor.dim() == 2 else 0) for name, tensor in first.items()
    }
    library = library_of(tmp_path, base, {"a": first, "b": second, "c": expert_of(base, 2, rank=2)}, rank_fraction=0.1)
    model = AdaptiveModel(base, library)
    both = frozenset("ab")
    name = "blocks.0.up.weight"
    assert core_of(library.merge(["a", "b"]).factors(name), TSV()).amplification > FLOAT32_LIMIT
    parallel = model.composer.compose(both)
    assert not parallel.low_rank
    assert name in model.composer.compose(frozenset("ac")).low_rank
    x = torch.randn(4, 5, WIDTH)
    with applied(base, parallel):
        found = base(x).detach()
    reference = encoder()
    reference.load_state_dict(library.merge(["a", "b"]).state_dict())
    torch.testing.assert_close(found, reference(x).detach(), atol=1e-5, rtol=1e-4)


def test_sets_share_the_factors_and_keep_their_cores(tmp_path):
    base = encoder()
    experts = {task: expert_of(base, seed, rank=2) for seed, task in enumerate("abc")}
    library = library_of(tmp_path, base, experts, rank_fraction=0.125)
    composer = AdaptiveModel(base, library).composer
    pair, alone = composer.compose(frozenset("ab")), composer.compose(frozenset("a"))
    name = "blocks.1.down.weight"
    assert pair.low_rank[name].left[0].data_ptr() == alone.low_rank[name].left[0].data_ptr()
    vectors = sum(tensor.nbytes for tensor in pair.whole.values())
    assert pair.nbytes == vectors + 6 * 4 * 4 * 4
    assert alone.nbytes == vectors + 6 * 2 * 4
    assert pair.low_rank[name].per_row == 2 * 2 * 3 * WIDTH + 4 * 4


def test_half_precision_modules_get_updates_of_full_precision(tmp_path):
    base = encoder().bfloat16()
    experts = {task: expert_of(base.float(), seed, rank=2) for seed, task in enumerate("ab")}
    base = base.bfloat16()
    library = library_of(tmp_path, base, experts, rank_fraction=0.125)
    composition = AdaptiveModel(base, library).composer.compose(frozenset("ab"))
    name = "blocks.1.up.weight"
    update = composition.low_rank[name]
    assert update.core.dtype == torch.float32
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    expected = x.float() @ (library.merge(["a", "b"]).read(name) - base.get_parameter(name).float()).T
    assert update.applied_to(x, base.blocks[1].up).dtype == torch.bfloat16
    torch.testing.assert_close(update.applied_to(x, base.blocks[1].up).float(), expected, atol=0, rtol=2**-8)
    assert update.added_to(base.get_parameter(name).detach()).dtype == torch.bfloat16
