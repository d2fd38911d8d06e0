"""A model with the tokenizer of another: rows against plain arithmetic, files against what transformers needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import merganser as mg
from merganser.checkpoints.row_fits import fit_sparse
from merganser.checkpoints.token_bytes import match_tokens, spell_bytes
from merganser.checkpoints.tokenizer import read_tokens
from merganser.errors import CheckpointError, InputError, RecipeError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KINDS = ["byte_level", "metaspace", "unigram", "wordpiece"]


def shared_rows(model: Path, donor: Path) -> tuple[dict[int, int], list[int]]:
    """Donor row -> own row, and the donor rows without a match."""
    target, own = read_tokens(donor), read_tokens(model)
    matched = match_tokens(target, own)
    found = {target.ids[t]: own.ids[o] for t, o in matched.items()}
    return found, sorted(set(target.ids.values()) - set(found))


def pursue_naively(target, atoms, terms):
    chosen: list[int] = []
    residual = target
    for _ in range(terms):
        fit = np.abs(atoms @ residual)
        fit[chosen] = -1
        chosen.append(int(fit.argmax()))
        weights = np.linalg.lstsq(atoms[chosen].T, target, rcond=None)[0]
        residual = target - weights @ atoms[chosen]
    return chosen, weights


def trust_naively(atoms, ours, terms):
    """How far shared rows that are left out can be predicted from the others."""
    held = [int(place) for place in np.linspace(0, len(atoms) - 1, len(atoms) // 4)]
    rest = [place for place in range(len(atoms)) if place not in held]
    agreement = size = 0.0
    for place in held:
        chosen, weights = pursue_naively(atoms[place], atoms[rest], terms)
        predicted = weights @ ours[rest][chosen]
        agreement, size = agreement + predicted @ ours[place], size + predicted @ predicted
    return min(1.0, max(0.0, agreement / size))


@pytest.mark.parametrize("own", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_shared_tokens_stand_for_the_same_text(llama, own, other):
    """The tokenizers' own decoders say what an ordinary token stands for."""
    model = read_tokens(llama("model", own))
    donor = model if own == other else read_tokens(llama("donor", other))
    matched = match_tokens(donor, model)
    assert len(matched) > 30
    special = {*donor.roles.values()}
    for token, match in matched.items():
        if token not in special:
            assert spell_bytes(token, donor.spelling) == spell_bytes(match, model.spelling)
    if own == other:
        assert matched == {token: token for token in donor.ids}
    elif "byte_level" not in (own, other):
        roles = {"bos": "bos", "eos": "eos", "unk": "unk", "cls": "bos", "sep": "eos"}
        for role, token in donor.roles.items():
            kin = role if role in model.roles else {"bos": "cls", "eos": "sep"}.get(role, roles[role])
            assert matched[token] == model.roles[kin]


def test_no_two_tokens_get_the_same_row(llama):
    """A row that stood twice in a head would halve the probability of its token."""
    model, donor = read_tokens(llama("model", "byte_level")), read_tokens(llama("donor", "metaspace", 420))
    matched = match_tokens(donor, model)
    assert matched["a"] == "a"
    assert "<0x61>" not in matched
    assert matched["<0x00>"] == "Ā"
    ordinary = [match for token, match in matched.items() if token not in donor.roles.values()]
    assert len(set(ordinary)) == len(ordinary)


def test_bytes_of_spellings():
    assert spell_bytes("Ġthe", "byte_level") == spell_bytes("▁the", "metaspace") == spell_bytes("the", "wordpiece")
    assert spell_bytes("Ċ", "byte_level") == spell_bytes("<0x0A>", "metaspace") == b"\n"
    assert spell_bytes("Ã©", "byte_level") == spell_bytes("é", "metaspace") == spell_bytes("##é", "wordpiece")
    assert spell_bytes(",", "wordpiece") == b","


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("donor_tied", [True, False])
def test_omp_equals_a_naive_loop(llama, tied, donor_tied):
    model = llama("model", "metaspace", 420, tied=tied, pad=3)
    donor = llama("donor", "byte_level", 400, hidden=12, tied=donor_tied, seed=1)
    view = mg.surgery.transplant(model, donor, terms=3)
    shared, absent = shared_rows(model, donor)
    own, theirs = mg.open(model), mg.open(donor)
    for name in [EMBEDDING] if tied else [EMBEDDING, HEAD]:
        fitted_in = theirs[name if name in theirs else EMBEDDING].double().numpy()
        made, mine = view[name], own[name].double().numpy()
        assert made.shape == (len(fitted_in), 8)
        assert torch.equal(made[list(shared)], own[name][list(shared.values())])
        rows = list(shared)
        atoms, ours = fitted_in[rows], mine[[shared[row] for row in rows]]
        centre, mean = atoms.mean(0), ours.mean(0)
        trust = trust_naively(atoms - centre, ours - mean, 3)
        for row in absent:
            chosen, weights = pursue_naively(fitted_in[row] - centre, atoms - centre, 3)
            expected = mean + trust * weights @ (ours[chosen] - mean)
            np.testing.assert_allclose(made[row].numpy(), expected, rtol=1e-3, atol=1e-4)
    unchanged = [name for name in own.names() if name not in (EMBEDDING, HEAD)]
    assert all(torch.equal(view[name], own[name]) for name in unchanged)
    assert torch.equal(view.read(EMBEDDING, (7, 31)), view[EMBEDDING][7:31])


def test_a_donor_that_tells_nothing_gives_the_mean_and_one_that_tells_all_gives_the_row():
    generator = torch.Generator().manual_seed(0)
    atoms, turn = torch.randn(400, 6, generator=generator), torch.randn(6, 5, generator=generator)
    targets, strange = torch.randn(20, 6, generator=generator), torch.randn(400, 5, generator=generator)

    def fit(ours):
        indices, factors, shares = fit_sparse(targets, atoms, lambda places: ours[torch.from_numpy(places)], 6)
        return torch.einsum("tk,tkd->td", factors, ours[indices]) + shares[:, None] * ours.mean(0)

    torch.testing.assert_close(fit(atoms @ turn + 3.0), targets @ turn + 3.0, rtol=1e-3, atol=1e-3)
    apart = (fit(strange) - strange.mean(0)).norm(dim=1).mean()
    assert apart < 0.3 * strange.norm(dim=1).mean()


@pytest.mark.parametrize("rule", ["nearest", "mean", "zero"])
def test_simple_rules(llama, rule):
    model, donor = llama("model", "unigram", 150), llama("donor", "byte_level", 380, seed=2)
    made = mg.surgery.transplant(model, donor, absent=rule)[EMBEDDING]
    shared, absent = shared_rows(model, donor)
    own, theirs = mg.open(model)[EMBEDDING], mg.open(donor)[EMBEDDING]
    if rule == "nearest":
        directions = torch.nn.functional.normalize(theirs, dim=1)
        best = (directions[absent] @ directions[list(shared)].T).argmax(1)
        expected = own[torch.tensor(list(shared.values()))[best]]
    else:
        expected = own.mean(0).expand(len(absent), -1) if rule == "mean" else torch.zeros(len(absent), 8)
    torch.testing.assert_close(made[absent], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_subwords_are_the_pieces_of_the_old_tokenizer(llama, kind):
    tokenizers = pytest.importorskip("tokenizers")
    model, donor = llama("model", kind, 330 if kind in ("metaspace", "byte_level") else 120), llama("donor", size=420)
    plain = mg.surgery.transplant(model, donor, absent="subwords")[EMBEDDING]
    weighted = mg.surgery.transplant(model, donor, absent="weighted_subwords")[EMBEDDING]
    own, tokens = mg.open(model)[EMBEDDING], read_tokens(donor)
    whole = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = read_tokens(model)
    tested = 0
    for row in shared_rows(model, donor)[1]:
        token = next(t for t, i in tokens.ids.items() if i == row)
        text = spell_bytes(token, "byte_level")
        if not text.isascii() or not text.startswith(b" ") or not text[1:].isalpha():
            continue  # a word as the tokenizer itself would meet it
        pieces = whole.encode(text.decode() if kind == "byte_level" else text.decode()[1:]).ids
        assert torch.allclose(plain[row], own[pieces].mean(0), atol=1e-6)
        lengths = torch.tensor([len(spell_bytes(whole.id_to_token(i), ids.spelling)) for i in pieces]).float()
        assert torch.allclose(weighted[row], (lengths / lengths.sum()) @ own[pieces], atol=1e-6)
        tested += 1
    assert tested > 5


def test_output_loads_and_generates(llama, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = llama("model", "metaspace", 420, template="{{ messages }}")
    donor = llama("donor", "byte_level", 400, hidden=12, pad=5)
    out = mg.save(mg.surgery.transplant(model, donor), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (
        loaded.config.vocab_size
        == loaded.get_input_embeddings().num_embeddings
        == mg.open(donor).spec(EMBEDDING).shape[0]
    )
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.chat_template == "{{ messages }}"  # the donor has none
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["temperature"] == 0.7
    assert "unk_token_id" not in generation  # the donor has no such token
    assert loaded.generate(**tokenizer("The fox", return_tensors="pt"), max_new_tokens=3).shape[1] > 3
    same = transformers.AutoTokenizer.from_pretrained(donor)
    assert tokenizer("the lazy dog").input_ids == same("the lazy dog").input_ids


@pytest.mark.parametrize("said", ["by the model", "as null", "nowhere"])
def test_tokens_that_the_donor_lacks_do_not_fall_back_to_the_architecture(llama, tmp_path, said):
    """Without the key, a Llama would end texts at token 2, which is any word of the donor."""
    transformers = pytest.importorskip("transformers")
    model, donor = llama("model", "metaspace", 420), llama("donor", "byte_level", 400)
    absent = ("bos_token_id", "eos_token_id")
    files = [(donor / "tokenizer_config.json", ("bos_token", "eos_token")), (donor / "config.json", absent)]
    for path, roles in [*files, (model / "config.json", absent)] if said == "nowhere" else files:
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in roles}
        path.write_text(json.dumps(kept | dict.fromkeys(roles) if said == "as null" else kept))
    (donor / "generation_config.json").unlink()
    out = mg.save(mg.surgery.transplant(model, donor), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(out)
    generation = transformers.AutoModelForCausalLM.from_pretrained(out).generation_config
    for key in absent:
        assert getattr(config, key) is None
        assert getattr(generation, key) is None
    assert not {*absent} & {*json.loads((out / "generation_config.json").read_text())}


def test_the_language_model_inside_another_gets_the_ids_too(llama, tmp_path):
    model, donor = llama("model", "metaspace", 420), llama("donor", "byte_level", 400)
    inner = {"model_type": "llama", "vocab_size": 420, "eos_token_id": 7, "unk_token_id": 3, "hidden_size": 8}
    outer = {"model_type": "llava", "text_config": inner, "vision_config": {"eos_token_id": 49407}}
    (model / "config.json").write_text(json.dumps(outer))
    out = mg.save(mg.surgery.transplant(model, donor), tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    own = json.loads((donor / "config.json").read_text())
    rows = mg.open(donor).spec(EMBEDDING).shape[0]
    expected = {"vocab_size": rows, "eos_token_id": own["eos_token_id"], "bos_token_id": own["bos_token_id"]}
    assert {key: written["text_config"].get(key) for key in expected} == expected
    assert "unk_token_id" not in written["text_config"]
    assert written["vision_config"] == outer["vision_config"]
    # and back, from the section to the top
    (donor / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    section = {"model_type": "llava", "text_config": own}
    (donor / "config.json").write_text(json.dumps(section))
    (model / "config.json").write_text(json.dumps(inner))
    back = mg.save(mg.surgery.transplant(model, donor), tmp_path / "back")
    assert json.loads((back / "config.json").read_text())["eos_token_id"] == own["eos_token_id"]


def test_there_and_back_is_the_model_itself(llama, tmp_path):
    """Tokens that both have keep their rows, also by way of a third vocabulary."""
    model, donor = llama("model", "metaspace", 420), llama("donor", "byte_level", 400, seed=3)
    there = mg.save(mg.surgery.transplant(model, donor), tmp_path / "there")
    back = mg.surgery.transplant(there, model)[EMBEDDING]
    shared, _ = shared_rows(model, donor)
    kept = [own for row, own in shared.items()]
    assert torch.equal(back[kept], mg.open(model)[EMBEDDING][kept])


def test_recipes_merge_models_of_different_tokenizers(llama, tmp_path):
    model, other = llama("model", "metaspace", 420), llama("other", "byte_level", 400, seed=4)
    recipe = {
        "method": "linear",
        "models": [str(model), str(other)],
        "output": {"tokenizer": {"source": str(other), "absent": "omp", "terms": 4}},
    }
    out = mg.run(recipe, tmp_path / "out")
    expected = (mg.surgery.transplant(model, other, terms=4)[EMBEDDING] + mg.open(other)[EMBEDDING]) / 2
    torch.testing.assert_close(mg.open(out)[EMBEDDING], expected)
    assert read_tokens(out).ids == read_tokens(other).ids


def test_resumes_to_the_same_bytes(llama, tmp_path):
    model, donor = llama("model", "metaspace", 420), llama("donor", seed=5)
    whole = mg.save(mg.surgery.transplant(model, donor), tmp_path / "whole")

    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.done >= 5:
            raise Stopped

    with pytest.raises(Stopped):
        mg.save(mg.surgery.transplant(model, donor), tmp_path / "out", workers=1, on_progress=stop)
    out = mg.save(mg.surgery.transplant(model, donor), tmp_path / "out", resume=True)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    half = mg.save(mg.surgery.transplant(model, donor), tmp_path / "half", dtype="bfloat16")
    assert mg.open(half).spec(EMBEDDING).dtype == torch.bfloat16
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_refuses_what_cannot_work(llama, tmp_path):
    model, donor = llama("model"), llama("donor", "metaspace", 420)
    with pytest.raises(InputError, match="unknown rule for absent tokens 'opm'; did you mean 'omp'"):
        mg.surgery.transplant(model, donor, absent="opm")
    with pytest.raises(InputError, match="terms=3 is for absent='omp'"):
        mg.surgery.transplant(model, donor, absent="mean", terms=3)
    with pytest.raises(InputError, match="both the model and the donor"):
        mg.surgery.transplant(model, model)
    union = {"method": "linear", "models": [str(model)], "output": {"tokenizer": {"source": "union", "absent": "omp"}}}
    with pytest.raises(RecipeError, match="name a model as the source"):
        mg.run(union, tmp_path / "out")
    foreign = json.loads((donor / "tokenizer.json").read_text())
    vocabulary = {f"№{i}": i for i in range(420)}
    foreign["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "№0"}
    (donor / "tokenizer.json").write_text(json.dumps(foreign | {"added_tokens": []}))
    with pytest.raises(CheckpointError, match=r"has 0 of the 420 tokens .* needs 8.*; use the rule subwords"):
        mg.surgery.transplant(model, donor)
    (donor / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"^the tokenizer of .*donor for .*model: .*donor has no tokenizer\.json"):
        mg.surgery.transplant(model, donor)
    same_rows = shutil.copytree(model, tmp_path / "same-rows")
    (same_rows / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"same-rows has no tokenizer\.json"):
        mg.surgery.transplant(model, same_rows)
    assert not (tmp_path / "out").exists()
