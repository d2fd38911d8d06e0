"""STI and its relatives against naive float64 versions, and the advice they lead to."""

import json

import numpy as np
import pytest
import torch

from merganser.checkpoints.tensor_names import block_of, natural_order
from merganser.errors import CheckpointError, InputError
from merganser.interference import survey
from merganser.interference.records import FRACTIONS
from merganser.interference.sti import Overlap, full_rank_procrustes, square_procrustes
from merganser.interference.surveys import similarity
from merganser.kernels import spectra
from merganser.kernels.spectra import Factors
from merganser.library import Library


def naive_factors(deltas, k):
    parts = [np.linalg.svd(np.asarray(d, dtype=np.float64), full_matrices=False) for d in deltas]
    return [(u[:, :k], s[:k], vt[:k].T) for u, s, vt in parts]


def naive_sti(parts):
    u, v = (np.concatenate([p[i] for p in parts], axis=1) for i in (0, 2))
    s = np.diag(np.concatenate([p[1] for p in parts]))
    n = len(s)
    return np.abs((u.T @ u - np.eye(n)) @ s @ (v.T @ v - np.eye(n))).sum()


def overlap(parts):
    return Overlap.of([Factors(*map(torch.from_numpy, part)) for part in parts])


def draw(t, d, m, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((d, m)) for _ in range(t)]


def models(t=3, seed=0, twin=False):
    rng = torch.Generator().manual_seed(seed)
    base = {
        "layers.0.q.weight": torch.randn(24, 16, generator=rng),
        "layers.1.q.weight": torch.randn(16, 40, generator=rng),
        "layers.1.norm.weight": torch.ones(16),
        "steps": torch.tensor([1]),
    }
    experts = {}
    for index in range(t):
        source = torch.Generator().manual_seed(100 if twin else seed + 1 + index)
        experts[f"e{index}"] = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=source) if tensor.is_floating_point() else tensor
            for name, tensor in base.items()
        }
    return base, experts


@pytest.mark.parametrize(("t", "d", "m", "k"), [(2, 20, 12, 3), (4, 12, 30, 3), (3, 16, 16, 9), (1, 9, 7, 2)])
def test_sti_is_the_thesis_formula(t, d, m, k):
    parts = naive_factors(draw(t, d, m), k)
    assert overlap(parts).interference() == pytest.approx(naive_sti(parts), abs=1e-9)


def test_unrelated_experts_are_at_chance():
    for seed in range(3):
        found = overlap(naive_factors(draw(6, 96, 80, seed), 12))
        assert found.normalized() == pytest.approx(found.chance(), rel=0.1)


def test_normalisation_forgets_scale_and_size():
    small = overlap(naive_factors(draw(4, 60, 40), 5)).normalized()
    scaled = overlap(naive_factors([100 * d for d in draw(4, 60, 40)], 5)).normalized()
    large = overlap(naive_factors(draw(4, 240, 160), 20)).normalized()
    assert scaled == pytest.approx(small)
    assert large == pytest.approx(small, rel=0.2)


def test_orthogonal_experts_do_not_interfere_and_identical_ones_do():
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((40, 40)))[0]
    blocks = [(q[:, i : i + 8], np.ones(8), q[:, i : i + 8]) for i in (0, 8, 16)]
    assert overlap(blocks).interference() == pytest.approx(0, abs=1e-9)
    same = overlap([blocks[0]] * 3)
    # (J − I)² ⊗ I has entries adding up to T (T − 1)² per component.
    assert same.interference() == pytest.approx(8 * 3 * 2**2)
    assert same.normalized() == pytest.approx(1)
    np.testing.assert_allclose(same.pairs(), 1 - np.eye(3))
    one_side = [(q[:, i : i + 8], np.ones(8), q[:, :8]) for i in (0, 8)]
    assert overlap(one_side).interference() == pytest.approx(0, abs=1e-9)


def test_merging_removes_interference_that_fits():
    parts = naive_factors(draw(4, 40, 32), 8)
    assert overlap(parts).after_merging() < 1e-6 * overlap(parts).interference()
    crowded = naive_factors(draw(4, 40, 32), 16)
    assert overlap(crowded).after_merging() > 1e-3 * overlap(crowded).interference()


@pytest.mark.parametrize("k", [3, 8, 12])
def test_procrustes_error(k):
    parts = naive_factors(draw(3, 30, 12), k)
    for side, found in zip((0, 2), overlap(parts).procrustes(), strict=True):
        u = np.concatenate([p[side] for p in parts], axis=1)
        p, _, q = np.linalg.svd(u, full_matrices=False)
        assert found == pytest.approx(np.linalg.norm(u - p @ q) / np.linalg.norm(u), abs=1e-6)


def test_full_rank_procrustes():
    bases = [torch.from_numpy(np.linalg.qr(d)[0]) for d in draw(4, 9, 9)]
    assert square_procrustes(9, 4) == pytest.approx(full_rank_procrustes(bases)) == pytest.approx(0.5)
    tall = [torch.from_numpy(np.linalg.qr(d)[0]) for d in draw(4, 20, 9)]
    u = torch.cat(tall, dim=1).numpy()
    p, _, q = np.linalg.svd(u, full_matrices=False)
    assert full_rank_procrustes(tall) == pytest.approx(np.linalg.norm(u - p @ q) / np.linalg.norm(u))


def test_inner_products_from_factors():
    deltas = draw(3, 14, 10)
    found = overlap(naive_factors(deltas, 10)).inner_products()
    np.testing.assert_allclose(found, [[np.sum(a * b) for b in deltas] for a in deltas], atol=1e-9)


@pytest.mark.parametrize("full_rank", [False, True])
def test_report_of_checkpoints(full_rank):
    base, experts = models()
    report = survey(base, experts, full_rank=full_rank)
    assert [m.name for m in report.matrices] == ["layers.0.q.weight", "layers.1.q.weight"]
    assert [b.block for b in report.blocks] == ["layers.0", "layers.1"]
    first = report.matrices[0]
    deltas = [(e["layers.0.q.weight"].double() - base["layers.0.q.weight"].double()).numpy() for e in experts.values()]
    assert first.rank == 5
    assert first.sti == pytest.approx(naive_sti(naive_factors(deltas, 5)), rel=1e-6)
    s = np.linalg.svd(deltas[1], compute_uv=False)
    assert first.energy[1] == pytest.approx(np.sum(s[:5] ** 2) / np.sum(s**2), rel=1e-6)
    p = s / s.sum()
    assert first.effective_rank[1] == pytest.approx(np.exp(-np.sum(p * np.log(p))), rel=1e-5)
    assert len(first.energy_curve) == 3
    assert first.energy_curve[0][-1] == pytest.approx(1)
    assert len(first.energy_curve[0]) == len(FRACTIONS)
    assert first.procrustes_full[1] == pytest.approx(square_procrustes(16, 3), rel=1e-6)
    assert (first.procrustes_full[0] is None) != full_rank
    flat = [
        np.concatenate([(e[n].double() - base[n].double()).numpy().ravel() for n in base if n != "steps"])
        for e in experts.values()
    ]
    wanted = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in flat] for a in flat]
    np.testing.assert_allclose(report.cosine, wanted, atol=1e-6)
    json.dumps(report.to_dict())


def test_a_library_tells_the_same(tmp_path):
    base, experts = models()
    library = Library.build(base, experts, tmp_path / "lib", rank_fraction=0.5, dtype="float32")
    stored, whole = survey(library), survey(base, experts)
    assert stored.truncated
    for ours, theirs in zip(stored.matrices, whole.matrices, strict=True):
        assert ours.sti == pytest.approx(theirs.sti, rel=1e-3)
        np.testing.assert_allclose(ours.pairs, theirs.pairs, rtol=1e-2)
    assert survey(library, ["e0", "e2"]).experts == ("e0", "e2")


def test_advice_names_twins_and_a_method():
    base, experts = models(3)
    _, twins = models(2, twin=True)
    report = survey(base, {"a": twins["e0"], "b": twins["e1"], "c": experts["e2"]})
    kinds = {advice.kind for advice in report.advice}
    assert {"twins", "collision", "where", "method", "rank"} <= kinds
    assert next(a for a in report.advice if a.kind == "twins").experts == ("a", "b")
    assert next(a for a in report.advice if a.kind == "collision").experts == ("a", "b")
    assert "tsv" in next(a for a in report.advice if a.kind == "method").text
    calm = survey(base, experts)
    assert "twins" not in {advice.kind for advice in calm.advice}


def test_unequal_norms_are_named():
    base, experts = models(2)
    long = {name: base[name] + 3 * (value - base[name]) for name, value in experts["e1"].items()}
    report = survey(base, {"short": experts["e0"], "long": long})
    assert report.norms == pytest.approx(
        [
            sum(float((expert[n].double() - base[n].double()).square().sum()) for n in base) ** 0.5
            for expert in (experts["e0"], long)
        ]
    )
    (advice,) = [each for each in report.advice if each.kind == "norms"]
    assert advice.experts == ("short", "long")
    assert "norms: equal" in advice.text
    assert "norms" not in {each.kind for each in survey(base, experts).advice}


def test_advice_on_where_names_only_what_exceeds_chance():
    rng = torch.Generator().manual_seed(0)
    names = ("layers.0.weight", "layers.1.weight")
    base = {name: torch.zeros(64, 64) for name in names}
    experts = {f"e{i}": {name: torch.randn(64, 64, generator=rng) for name in names} for i in range(2)}

    def where():
        return next(advice.text for advice in survey(base, experts).advice if advice.kind == "where")

    assert where().startswith("no block interferes clearly more than unrelated experts would (at most ")
    common = 3 * torch.randn(64, 64, generator=rng)
    for expert in experts.values():
        expert["layers.1.weight"] += common
    assert where().startswith("interference is highest in layers.1 (")
    assert "layers.0" not in where()


def test_opposed_experts_are_named():
    base, experts = models(1)
    other = {name: 2 * base[name] - tensor for name, tensor in experts["e0"].items()}
    report = survey(base, {"x": experts["e0"], "y": other})
    assert next(a for a in report.advice if a.kind == "opposed").experts == ("x", "y")


def test_one_expert_and_unchanged_matrices():
    base, experts = models(1)
    report = survey(base, experts)
    assert report.matrices[0].sti == pytest.approx(0, abs=1e-6)
    assert report.advice == ()
    assert survey(base, {"same": base, "again": base}).matrices == ()


def test_heat_maps_have_a_block_per_task():
    base, experts = models()
    left, right = similarity(base, experts, "layers.0.q.weight", 4)
    assert left.shape == right.shape == (12, 12)
    np.testing.assert_allclose(left[:4, :4], np.eye(4), atol=1e-8)


def test_input_is_checked():
    base, experts = models(1)
    with pytest.raises(InputError, match="at least one"):
        survey(base, {})
    with pytest.raises(InputError, match="give the experts"):
        survey(base)
    with pytest.raises(CheckpointError, match=r"has no tensor 'layers\.1\.norm\.weight'"):
        survey(base, {"x": {name: t for name, t in experts["e0"].items() if "norm" not in name}})
    with pytest.raises(CheckpointError, match="no tensor has the shape it has in the base"):
        survey(base, {"x": {name: torch.zeros(2, 2, 2) for name in base}})


def test_heads_of_another_shape_are_left_out_as_in_a_library(tmp_path):
    base, experts = models(2)
    base["head.weight"] = torch.zeros(10, 16)
    heads = {"e0": torch.ones(4, 16), "e1": torch.ones(10, 16)}
    experts = {name: state | {"head.weight": heads[name]} for name, state in experts.items()}
    found = survey(base, experts)
    stored = survey(Library.build(base, experts, tmp_path / "lib", rank_fraction=1.0, dtype="float32"))
    assert found.left_out == stored.left_out == {"e0": ("head.weight",)}
    assert [m.name for m in found.matrices] == [m.name for m in stored.matrices]
    assert "head.weight" not in {m.name for m in found.matrices}
    np.testing.assert_allclose(found.cosine, stored.cosine, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("encoder.layer.11.output.dense.weight", "encoder.layer.11"),
        ("embed_tokens.weight", "embed_tokens"),
        ("weight", "weight"),
    ],
)
def test_blocks(name, block):
    assert block_of(name) == block


def test_layers_come_in_the_order_people_count():
    rng = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.{part}.weight": torch.randn(8, 6, generator=rng) for i in (10, 2, 1, 11) for part in "qa"}
    experts = {e: {n: t + torch.randn(t.shape, generator=rng) for n, t in base.items()} for e in "xy"}
    found = survey(base, experts)
    assert [b.block for b in found.blocks] == [f"layers.{i}" for i in (1, 2, 10, 11)]
    assert [m.name for m in found.matrices][:3] == ["layers.1.a.weight", "layers.1.q.weight", "layers.2.a.weight"]
    assert sorted(["b10", "b9x", "b9", "a", "9", "10.w"], key=natural_order) == ["9", "10.w", "a", "b9", "b9x", "b10"]


def test_every_matrix_is_decomposed_once(monkeypatch):
    """One Gram matrix for each expert and matrix, none for what did not change, no vectors where all fit."""
    base = {name: torch.randn(80, 48, generator=torch.Generator().manual_seed(1)) for name in ("a", "b", "still")}
    experts = {e: {n: t + (torch.randn(80, 48) if n != "still" else 0) for n, t in base.items()} for e in "xy"}
    grams, vectors = [], []
    gram, eigh = spectra.gram, torch.linalg.eigh
    monkeypatch.setattr(spectra, "gram", lambda *args, **kw: grams.append(1) or gram(*args, **kw))
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args: vectors.append(1) or eigh(*args))
    found = survey(base, experts)
    assert [m.name for m in found.matrices] == ["a", "b"]
    assert len(grams) == 4
    assert not vectors


def large_experts(rows, exponent, count=3):
    """Experts whose task matrices have a power-law spectrum and something in common, with sides that take float32."""
    rng = torch.Generator().manual_seed(0)
    n = min(rows, 520)
    decay = torch.arange(1, n + 1) ** -exponent
    common = torch.randn(rows, n, generator=rng) * decay @ torch.randn(n, 520, generator=rng)
    own = [torch.randn(rows, n, generator=rng) * decay @ torch.randn(n, 520, generator=rng) for _ in range(count)]
    base = {"layers.0.q.weight": torch.randn(rows, 520, generator=rng)}
    size = 1e-3 / common.std()
    experts = {
        f"e{i}": {"layers.0.q.weight": base["layers.0.q.weight"] + size * (o + common / 2)} for i, o in enumerate(own)
    }
    return base, experts


@pytest.mark.parametrize(("rows", "exponent"), [(900, 0.0), (520, 0.4), (700, 0.7), (600, 4.0)])
def test_figures_in_float32_are_those_in_float64(monkeypatch, rows, exponent):
    """Every figure within 2e-3; a spectrum that float32 cannot resolve takes float64 by itself."""
    base, experts = large_experts(rows, exponent)
    (quick,) = survey(base, experts).matrices
    monkeypatch.setattr("merganser.kernels.leading.LARGE", 10**9)
    (exact,) = survey(base, experts).matrices
    for name in ("sti", "normalized", "chance", "procrustes", "effective_rank", "energy", "energy_curve", "pairs"):
        np.testing.assert_allclose(getattr(quick, name), getattr(exact, name), rtol=2e-3, err_msg=name)
    assert quick.sti_after == pytest.approx(exact.sti_after, abs=1e-9)


def test_twins_are_noticed_in_float32(monkeypatch):
    """Directions that experts share vanish on both sides: their number, not their rounding, is what is seen."""
    base, experts = large_experts(600, 0.5)
    experts["e1"] = {name: tensor.clone() for name, tensor in experts["e0"].items()}
    (quick,) = survey(base, experts).matrices
    monkeypatch.setattr("merganser.kernels.leading.LARGE", 10**9)
    (exact,) = survey(base, experts).matrices
    assert exact.sti_after > 0
    assert quick.sti_after == pytest.approx(exact.sti_after, rel=2e-3)
    np.testing.assert_allclose(quick.procrustes, exact.procrustes, rtol=2e-3)


def test_some_layers_stand_for_all():
    base, experts = models()
    base, *others = (
        {f"layers.{layer}.q.weight": model["layers.0.q.weight"] + layer for layer in range(12)}
        | {"head.weight": torch.ones(4, 4)}
        for model in (base, *experts.values())
    )
    experts = dict(zip(experts, others, strict=True))
    seen = []
    found = survey(base, experts, layers=4, on_progress=lambda *event: seen.append(event))
    assert [m.name for m in found.matrices] == [f"layers.{layer}.q.weight" for layer in (0, 4, 7, 11)]
    names = ["head.weight", *(m.name for m in found.matrices)]
    assert seen == [(done, len(names), name) for done, name in enumerate(names)]
    assert found.layers == {"layers": (("layers.0", "layers.4", "layers.7", "layers.11"), 12)}
    whole = survey(base, experts)
    assert whole.layers == {}
    assert len(whole.matrices) == 12
    assert found.cosine == whole.cosine
    with pytest.raises(InputError, match="layers must be at least 1"):
        survey(base, experts, layers=0)


def test_an_expert_that_is_the_base_is_named():
    base, experts = models()
    report = survey(base, {**experts, "same": dict(base)})
    (advice,) = [each for each in report.advice if each.experts == ("same",)]
    assert advice.text == "same does not differ from the base: leave it out"
