"""The expert library: what goes in comes out, to the error and the byte that was asked for."""

import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

import merganser as mg
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import CheckpointError, InputError
from merganser.library import Library
from merganser.methods.base import Group
from merganser.methods.registry import build
from merganser.methods.tsv import TSV
from support.library_models import base_tensors, expert_tensors, experts


def delta_of(models, name, tensor):
    expert, base = (open_checkpoint(models[which]).read(tensor) for which in (name, "base"))
    return (expert.double() - base.double()).numpy()


def test_full_rank_gives_the_expert_back(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", rank_fraction=1.0)
    for name, path in experts(models).items():
        original, rebuilt = open_checkpoint(path), library.expert(name)
        assert list(rebuilt.names()) == list(original.names())
        for tensor in original.names():
            assert torch.equal(rebuilt.read(tensor), original.read(tensor)), tensor  # kept whole: it would be larger
            assert rebuilt.spec(tensor) == original.spec(tensor)


def test_half_precision_round_trip_is_exact_where_tensors_are_kept_whole(tmp_path):
    base = base_tensors(torch.bfloat16)
    expert = expert_tensors(base, 1)
    library = Library.build(base, {"e": expert}, tmp_path / "lib", rank_fraction=1.0)
    assert library.manifest.dtype == "bfloat16"
    assert all(torch.equal(library.expert("e").read(name), expert[name]) for name in expert)


@pytest.mark.parametrize(("dtype", "slack"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 4e-2)])
def test_error_is_the_discarded_energy(models, tmp_path, dtype, slack):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", rank_fraction=0.25, dtype=dtype)
    base = open_checkpoint(models["base"])
    for name in experts(models):
        for tensor, k in (("a.weight", 8), ("b.weight", 10)):
            delta = delta_of(models, name, tensor)
            s = np.linalg.svd(delta, compute_uv=False)
            error = delta - (library.expert(name).read(tensor).double() - base.read(tensor).double()).numpy()
            discarded = np.linalg.norm(s[k:])
            assert np.linalg.norm(error) <= discarded + slack * np.linalg.norm(s)
            assert np.linalg.norm(error) >= discarded - slack * np.linalg.norm(s)
            assert library.factors(name, tensor).rank == k
    kept = library.manifest.experts["math"].energy
    assert 0.5 < kept < 1


def test_rows_are_read_alone(models, tmp_path):
    expert = Library.build(models["base"], experts(models), tmp_path / "lib").expert("math")
    for tensor in ("a.weight", "norm.weight", "frozen.weight"):
        whole = expert.read(tensor)
        np.testing.assert_allclose(expert.read(tensor, (3, 9)), whole[3:9], atol=1e-6)


def test_what_did_not_change_costs_nothing(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    stored = library.expert("math").file.kinds
    assert "frozen.weight" not in stored
    assert "steps" not in stored
    assert library.factors("math", "frozen.weight") is None


def test_energy_decides_ranks(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", energy=0.8)
    s = np.linalg.svd(delta_of(models, "code", "b.weight"), compute_uv=False)
    share = np.cumsum(s**2) / np.sum(s**2)
    assert library.expert("code").file.rank("b.weight") == int((share < 0.8).sum()) + 1


@pytest.mark.parametrize("extra", [0, 1, 500, 4321, 20000, 10**6])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_budget_is_respected_to_the_byte(models, tmp_path, extra, dtype):
    least = None
    with pytest.raises(InputError, match="too small") as error:
        Library.build(models["base"], experts(models), tmp_path / "none", budget=10, dtype=dtype)
    least = int(str(error.value).rsplit(" ", 1)[1].replace(",", ""))
    budget = least + extra
    library = Library.build(models["base"], experts(models), tmp_path / "lib", budget=budget, dtype=dtype)
    used = sum(path.stat().st_size for path in (tmp_path / "lib/experts").iterdir())
    assert used == sum(library.size().experts.values()) <= budget
    if extra == 0:
        assert used == budget
    if extra == 10**6:
        assert library.expert("math").file.kinds["c.weight"] == "full" or dtype == "int8"
    if 0 < extra < 10**6:
        price = max((48 + 32), (40 + 96)) * (4 if dtype == "float32" else 1) + 4
        assert budget - used < price  # nothing that would fit is left unbought


def test_budget_buys_energy_where_it_is(tmp_path):
    base = {"big.weight": torch.zeros(40, 40), "small.weight": torch.zeros(40, 40)}
    rng = torch.Generator().manual_seed(0)
    expert = {
        "big.weight": torch.randn(40, 40, generator=rng),
        "small.weight": torch.randn(40, 40, generator=rng) / 100,
    }
    library = Library.build(base, {"e": expert}, tmp_path / "lib", budget=5000, dtype="float32")
    kinds = library.expert("e").file.kinds
    assert "big.weight" in kinds
    assert "small.weight" not in kinds


def test_merge_is_tsv_of_the_experts(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib", rank_fraction=0.4, dtype="float32")
    merged = library.merge().state_dict()
    base = open_checkpoint(models["base"])
    for name in base.names():
        if name in ("frozen.weight", "steps"):
            assert torch.equal(merged[name], base.read(name))
            continue
        tensors = tuple(open_checkpoint(path).read(name) for path in experts(models).values())
        group = Group(name, tensors, base.read(name), ("1", "2", "3"), tuple(tensors[0].shape))
        wanted = build(TSV, {}, "abc").merge(group)
        np.testing.assert_allclose(merged[name], wanted, atol=2e-5)


@pytest.mark.parametrize("weight", [(0.5, 1, 0), (-0.5, 1, 2), (0, 0, 1), (0, 0, 0)])
def test_weights_count_as_in_the_method(tmp_path, weight):
    base = base_tensors()
    states = {name: expert_tensors(base, seed) for seed, name in enumerate("abc")}
    merged = Library.build(base, states, tmp_path / "lib", rank_fraction=1.0).merge(weight=weight)
    expected = mg.merge(list(states.values()), base=base, method="tsv", weight=list(weight))
    for name in base:
        torch.testing.assert_close(merged.read(name), expected[name], rtol=1e-5, atol=1e-6)


def test_integers_of_the_base_do_not_round_floats_of_an_expert(tmp_path):
    base = {"w": torch.zeros(64, 64, dtype=torch.int64), "v": torch.full((64, 64), 1.5)}
    expert = {"w": torch.randn(64, 64), "v": torch.ones(64, 64, dtype=torch.int64)}
    library = Library.build(base, {"e": expert}, tmp_path / "lib", rank_fraction=0.1)
    masks = mg.library.MaskLibrary.build(
        base | {"x": torch.ones(2)}, {"e": expert | {"x": torch.zeros(2)}}, tmp_path / "m"
    )
    for found in (library.expert("e"), masks.expert("e"), mg.open(library.extract("e", tmp_path / "out"))):
        for name, tensor in expert.items():
            assert found.spec(name).dtype == tensor.dtype
            assert torch.equal(found.read(name), tensor)


def test_an_expert_may_lack_integer_buffers_of_the_base(tmp_path):
    base = {"w": torch.randn(32, 32), "position_ids": torch.arange(8)}
    experts = {name: {"w": base["w"] + torch.randn(32, 32)} for name in "ab"}
    library = Library.build(base, experts, tmp_path / "lib", rank_fraction=1.0)
    assert torch.equal(library.expert("a").read("position_ids"), base["position_ids"])
    torch.testing.assert_close(library.expert("a").read("w"), experts["a"]["w"])
    assert list(mg.interference.survey(base, experts).experts) == ["a", "b"]
    with pytest.raises(CheckpointError, match="no tensor 'w'"):
        Library.build(base, {"a": {"position_ids": base["position_ids"]}}, tmp_path / "other")


def test_merging_needs_no_decomposition_of_stored_matrices(models, tmp_path, monkeypatch):
    library = Library.build(models["base"], {"math": models["math"], "code": models["code"]}, tmp_path / "lib")
    monkeypatch.setattr("merganser.library.views.top_svd", lambda *_: pytest.fail("a full matrix was decomposed"))
    library.merge(["math", "code"]).read("a.weight")
    one = library.merge(["math"], scale=0.5)
    base = open_checkpoint(models["base"])
    half = base.read("a.weight") + 0.5 * (library.expert("math").read("a.weight") - base.read("a.weight"))
    np.testing.assert_allclose(one.read("a.weight"), half, atol=1e-6)


def test_adding_and_removing_touch_nothing_else(models, tmp_path):
    rest = {name: path for name, path in experts(models).items() if name != "chat"}
    library = Library.build(models["base"], rest, tmp_path / "lib")
    before = {path: path.read_bytes() for path in (tmp_path / "lib/experts").iterdir()}
    grown = library.add("chat", models["chat"])
    assert grown.experts == ("math", "code", "chat")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert grown.expert("chat").file.rank("a.weight") == 16
    with pytest.raises(InputError, match="already"):
        grown.add("chat", models["chat"])
    shrunk = grown.remove("math")
    assert shrunk.experts == ("code", "chat")
    assert not (tmp_path / "lib/experts/math.safetensors").exists()
    with pytest.raises(InputError, match="did you mean 'code'"):
        shrunk.expert("cod")


def test_extraction_is_an_ordinary_checkpoint(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    library.extract("code", tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    assert (tmp_path / "out/config.json").exists()
    for name in written.names():
        assert written.spec(name) == library.base.spec(name)
        np.testing.assert_allclose(written.read(name), library.expert("code").read(name), atol=1e-6)


def test_an_expert_can_be_opened_by_its_file(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    opened = open_checkpoint(tmp_path / "lib/experts/math.safetensors")
    assert torch.equal(opened.read("a.weight"), library.expert("math").read("a.weight"))


def test_heads_of_their_own_are_kept(tmp_path):
    base = base_tensors()
    expert = expert_tensors(base, 1) | {"head.weight": torch.randn(3, 32), "c.weight": torch.randn(9, 5)}
    library = Library.build(base, {"e": expert, "f": expert_tensors(base, 2)}, tmp_path / "lib")
    assert torch.equal(library.expert("e").read("head.weight"), expert["head.weight"])
    assert library.expert("e").spec("c.weight").shape == (9, 5)
    assert library.merge().read("c.weight").shape == (6, 5)


def test_randomized_factors_keep_the_energy(models, tmp_path):
    exact = Library.build(models["base"], experts(models), tmp_path / "exact")
    quick = Library.build(models["base"], experts(models), tmp_path / "quick", randomized=True)
    for name in experts(models):
        assert quick.manifest.experts[name].energy >= 0.98 * exact.manifest.experts[name].energy


def test_open_finds_an_expert_without_any_import(tmp_path):
    base = {"w": torch.randn(6, 5)}
    Library.build(base, {"a": {"w": base["w"] + torch.randn(6, 5)}}, tmp_path / "lib", copy_base=True)
    code = f"import merganser as mg; print(mg.open({str(tmp_path / 'lib' / 'experts' / 'a.safetensors')!r}).names())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['w']"
    with pytest.raises(CheckpointError, match="an expert library; open one of a as"):
        open_checkpoint(tmp_path / "lib")


def test_one_object_may_change_the_library_again_and_again(models, tmp_path):
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib")
    library.add("code", models["code"])
    assert library.add("chat", models["chat"]).experts == ("math", "code", "chat")
    with pytest.raises(InputError, match="has an expert 'code' already"):
        library.add("code", models["code"])
    opened = Library(tmp_path / "lib")
    opened.remove("math")
    assert opened.remove("code").experts == ("chat",)
    with pytest.raises(InputError, match="has no expert 'math'"):
        opened.remove("math")
    assert all(finding.sound for finding in Library(tmp_path / "lib").verify())


def test_a_library_within_a_budget_grows_from_nothing(models, tmp_path):
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib", budget=20_000)
    size = library.size().experts["math"]
    grown = library.remove("math").add("code", models["code"])
    assert size - 600 < grown.size().experts["code"] <= 20_000
    assert grown.add("chat", models["chat"]).size().experts["chat"] <= grown.size().experts["code"]


def test_a_wide_base_is_merged_in_its_own_precision(tmp_path):
    base = base_tensors(torch.float64)
    states = {name: expert_tensors(base, seed) for seed, name in enumerate(("e", "f"), start=1)}
    merged = Library.build(base, states, tmp_path / "lib").merge()
    for name in ("a.weight", "c.weight", "bias", "frozen.weight"):
        assert merged.read(name).dtype == torch.float64
    mean = (states["e"]["bias"] + states["f"]["bias"]) / 2
    np.testing.assert_allclose(merged.read("bias"), mean, rtol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_energy_kept_is_that_of_the_difference(tmp_path, dtype):
    base = base_tensors()
    expert = expert_tensors(base, 1) | {"head.weight": torch.randn(3, 32)}
    expert["bias"] = base["bias"] + 3  # kept whole, and most of the change
    library = Library.build(base, {"e": expert}, tmp_path / "lib", rank_fraction=0.25, dtype=dtype)
    rebuilt = library.expert("e")
    lost = sum(float((rebuilt.read(n).double() - expert[n].double()).square().sum()) for n in base)
    seen = sum(float((expert[n].double() - base[n].double()).square().sum()) for n in base)
    assert library.manifest.experts["e"].energy == pytest.approx(1 - lost / seen, abs=1e-6)
    assert library.manifest.experts["e"].energy > 0.9


def test_a_merge_is_saved_as_a_checkpoint(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    merged = library.merge(["math", "chat"], scale=0.5)
    mg.save(merged, tmp_path / "out", dtype="bf16")
    written = open_checkpoint(tmp_path / "out")
    for name in ("a.weight", "bias", "frozen.weight"):
        assert torch.equal(written.read(name), merged.read(name).bfloat16())
    assert (tmp_path / "out/config.json").exists()
    card = (tmp_path / "out/README.md").read_text()
    assert "math" in card
    assert "tsv" in card
    with pytest.raises(InputError, match="exists already"):
        mg.save(merged, tmp_path / "out")
    for save in (partial(mg.save, merged), partial(library.extract, "math")):
        with pytest.raises(InputError, match="cannot be replaced"):
            save(tmp_path / "lib", overwrite=True)
        with pytest.raises(InputError, match="cannot be replaced"):
            save(tmp_path, overwrite=True)
        with pytest.raises(InputError, match="cannot be replaced"):
            save(models["base"], overwrite=True)


def test_factors_are_those_of_matrices_that_exist(models, tmp_path):
    base = base_tensors()
    library = Library.build(base, {"e": expert_tensors(base, 1) | {"head": torch.ones(3, 4)}}, tmp_path / "lib")
    with pytest.raises(CheckpointError, match="has no tensor 'a.wieght'; did you mean 'a.weight'"):
        library.factors("e", "a.wieght")
    for name in ("bias", "head"):
        with pytest.raises(InputError, match=f"'{name}', .* is not a changed matrix"):
            library.factors("e", name)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16])
def test_dtypes_go_by_name_or_as_they_are(models, tmp_path, dtype):
    library = Library.build(models["base"], {"math": models["math"]}, tmp_path / "lib", rank_fraction=0.2, dtype=dtype)
    assert library.manifest.dtype == "bfloat16"
    library.extract("math", tmp_path / "out", dtype=dtype)
    assert open_checkpoint(tmp_path / "out").spec("bias").dtype == torch.bfloat16


def test_a_library_behaves_like_a_collection_of_names(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    names = list(experts(models))
    assert list(library) == list(library.experts) == names
    assert all(name in library for name in names)
    assert repr(library) == f"<Library {tmp_path / 'lib'}: {len(names)} experts: {', '.join(names)}>"
    first = names[0]
    with pytest.raises(InputError, match=rf"experts to merge are a list: write \['{first}'\]"):
        library.merge(first)


def test_a_library_is_pickled_by_its_path(models, tmp_path):
    library = Library.build(models["base"], experts(models), tmp_path / "lib")
    names = list(experts(models))
    first = names[0]
    library.expert(first)
    again = pickle.loads(pickle.dumps(library))
    assert again.experts == library.experts
    assert all(torch.equal(again.expert(first)[name], library.expert(first)[name]) for name in library.expert(first))
