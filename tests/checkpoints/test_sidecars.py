from __future__ import annotations

import hashlib
import json

import pytest
import torch
import yaml

from merganser.checkpoints.cards import Lineage, render_adapter_card, render_card
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.sidecars import (
    Sidecars,
    TokenizerFiles,
    _find_library,
    apply_edits,
    prepare_sidecars,
    read_chat_template,
)
from merganser.errors import CheckpointError

tokenizers = pytest.importorskip("tokenizers")


def model(path, files):
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    checkpoint = StateDict({"w": torch.ones(1)}, path.name)
    checkpoint.directory = path
    return checkpoint


def bpe(words=("hello", "world")):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<unk>", "<s>"], vocab_size=60, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer.to_str()


@pytest.fixture
def base(tmp_path):
    return model(
        tmp_path / "base",
        {
            "config.json": {
                "model_type": "llama",
                "vocab_size": 5,
                "torch_dtype": "float32",
                "quantization_config": {},
            },
            "generation_config.json": {"eos_token_id": 1},
            "tokenizer.json": bpe(),
            "tokenizer_config.json": {"chat_template": "old", "added_tokens_decoder": {}},
            "special_tokens_map.json": {},
            "merges.txt": "#version",
            "model.safetensors.index.json": {},
            "optimizer.pt": "not a sidecar",
        },
    )


def write(directory, sources, **sidecars):
    directory.mkdir()
    prepare_sidecars(Sidecars(**sidecars), sources)(directory)
    return directory


def test_the_files_a_model_needs_are_copied_and_no_others(tmp_path, base):
    out = write(tmp_path / "out", [base])
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "tokenizer.json").read_bytes() == (base.directory / "tokenizer.json").read_bytes()


def test_edits_reach_the_config(tmp_path, base):
    edits = [[["vocab_size"], 9], [["quantization_config"], None], [["text_config", "depth"], 2]]
    out = write(tmp_path / "out", [base], config=edits, generation=[[["eos_token_id"], 7]])
    assert json.loads((out / "config.json").read_text()) == {
        "model_type": "llama",
        "vocab_size": 9,
        "torch_dtype": "float32",
        "text_config": {"depth": 2},
    }
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 7}


def test_edited_leaves_its_argument_alone():
    config = {"a": {"b": 1}}
    assert apply_edits(config, [(["a", "b"], 2)]) == {"a": {"b": 2}}
    assert config == {"a": {"b": 1}}


def test_appended_tokens_load_and_have_their_ids(tmp_path, base):
    size = tokenizers.Tokenizer.from_file(str(base.directory / "tokenizer.json")).get_vocab_size()
    add = [
        {"id": size + k, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for k, content in enumerate(["<|im_start|>", "<|im_end|>"])
    ]  # fmt: skip
    out = write(tmp_path / "out", [base], tokenizer=TokenizerFiles(0, tuple(add)))
    loaded = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert loaded.token_to_id("<|im_end|>") == size + 1
    assert loaded.encode("<|im_start|>hello").ids[0] == size
    before = tokenizers.Tokenizer.from_file(str(base.directory / "tokenizer.json"))
    assert loaded.encode("hello world").ids == before.encode("hello world").ids
    decoder = json.loads((out / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert decoder[str(size)]["content"] == "<|im_start|>"
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    assert fast.convert_tokens_to_ids("<|im_end|>") == size + 1


def test_the_tokenizer_of_another_model(tmp_path, base):
    other = model(tmp_path / "other", {"tokenizer.json": bpe(["other"]), "config.json": {"never": "taken"}})
    out = write(tmp_path / "out", [base, other], tokenizer=TokenizerFiles(1))
    assert (out / "tokenizer.json").read_bytes() == (other.directory / "tokenizer.json").read_bytes()
    assert "never" not in (out / "config.json").read_text()
    assert not (out / "merges.txt").exists()


def test_a_chat_template_replaces_the_one_there_was(tmp_path, base):
    (base.directory / "chat_template.jinja").write_text("a file of its own")
    assert read_chat_template(base.directory) == "a file of its own"
    out = write(tmp_path / "out", [base], chat_template="{{ new }}")
    assert not (out / "chat_template.jinja").exists()
    assert read_chat_template(out) == "{{ new }}"


def test_chat_templates_for_other_uses_are_kept(tmp_path, base):
    folder = base.directory / "additional_chat_templates"
    folder.mkdir()
    (folder / "tools.jinja").write_text("{{ tools }}")
    out = write(tmp_path / "out", [base])
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert not (write(tmp_path / "changed", [base], chat_template="{{ new }}") / "additional_chat_templates").exists()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "bpe.codes",
            "byte_maps.json",
            "dict.txt",
            "emoji.json",
            "entity_vocab.json",
            "normalizer.json",
            "source.spm",
        ),
        *("source.spm", "target_vocab.json", "vocab-src.json", "word_shape.json", "audio_tokenizer_config.json"),
    ],
)
def test_files_of_every_tokenizer_are_copied(tmp_path, name):
    """Marian, PhoBERT, LUKE, Whisper, FSMT, RoCBert and others have files of their own."""
    source = model(tmp_path / "source", {name: {}})
    assert (write(tmp_path / "out", [source]) / name).is_file()


def test_all_code_of_a_model_is_kept_if_its_config_names_some(tmp_path):
    """The modules that `auto_map` names may import others beside them."""
    files = {"modeling_duck.py": "from .feathers import soft", "feathers.py": "soft = True"}
    plain = model(tmp_path / "plain", files | {"config.json": {}})
    named = {"auto_map": {"AutoModel": "modeling_duck.Duck"}}
    custom = model(tmp_path / "custom", files | {"config.json": named})
    assert not (write(tmp_path / "a", [plain]) / "feathers.py").exists()
    assert (write(tmp_path / "b", [custom]) / "feathers.py").read_text() == files["feathers.py"]


@pytest.mark.parametrize(
    ("file", "text", "sidecars", "message"),
    [
        ("config.json", "{", {"config": [[["vocab_size"], 9]]}, "not valid JSON"),
        ("generation_config.json", "[]", {"generation": [[["eos_token_id"], 9]]}, "expected a JSON object"),
        ("tokenizer_config.json", "{", {"chat_template": "x"}, "not valid JSON"),
        ("tokenizer_config.json", "[]", {"chat_template": "x"}, "expected a JSON object"),
        ("tokenizer.json", "[]", {"tokenizer": TokenizerFiles(0, ({"id": 9},))}, "expected a JSON object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": []}',
            {"tokenizer": TokenizerFiles(0, ({"id": 9},))},
            "added_tokens_decoder: expected a JSON object",
        ),
    ],
)
def test_broken_files_that_must_change_are_found_before_anything_is_written(base, file, text, sidecars, message):
    (base.directory / file).write_text(text)
    with pytest.raises(CheckpointError, match=f"{file}: {message}"):
        prepare_sidecars(Sidecars(**sidecars), [base])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_settings_have_no_template(tmp_path, text):
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer_config.json: "):
        read_chat_template(tmp_path)


def test_templates_by_name_and_absent_ones(tmp_path):
    assert read_chat_template(None) is None
    assert read_chat_template(tmp_path) is None
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert read_chat_template(tmp_path) == "d"


def test_weights_without_a_directory_get_a_card_only(tmp_path):
    out = write(tmp_path / "out", [StateDict({"w": torch.ones(1)})])
    assert [p.name for p in out.iterdir()] == ["README.md"]


def test_the_card_names_models_methods_and_the_recipe():
    recipe = "method: ties\n# ```\nmodels: [owner/a, ./b]"
    lineage = Lineage("owner/base@main", ("owner/a+owner/lora", "./b", "/data/c"), ("ties",))
    card = render_card(lineage, recipe)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": ["owner/base", "owner/a"],
        "base_model_relation": "merge",
        "library_name": "transformers",
        "tags": ["merge", "merganser"],
    }
    assert f"````yaml\n{recipe}\n````" in body
    assert "`ties`" in body
    assert "Base: `owner/base@main`" in body


@pytest.mark.parametrize(
    ("file", "content", "library"),
    [
        ("model_index.json", "{}", "diffusers"),
        ("config.json", '{"_diffusers_version": "0.30", "_class_name": "UNet2DConditionModel"}', "diffusers"),
        ("modules.json", "[]", "sentence-transformers"),
        ("config.json", '{"model_type": "llama"}', "transformers"),
    ],
)
def test_the_card_names_the_library_that_loads_the_model(file, content, library, tmp_path):
    (tmp_path / file).write_text(content)
    assert _find_library(tmp_path) == library


def test_the_card_of_an_adapter():
    card = render_adapter_card("owner/base", {"function": "merge_adapters", "method": "ties"}, ["owner/a", "./b`"])
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "owner/base",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "tags": ["lora", "merganser"],
    }
    assert "`owner/a`" in body
    assert "method: ties" in body
    assert "base_model" not in render_adapter_card("./local", {}, []).split("---\n")[1]


def test_the_same_plan_writes_the_same_bytes(tmp_path, base):
    def digest(directory):
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}

    sidecars = {"config": [[["vocab_size"], 9]], "chat_template": "{{ x }}", "recipe": "method: linear"}
    first, second = (write(tmp_path / name, [base], **sidecars) for name in ("one", "two"))
    assert digest(first) == digest(second)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "config.json", "chat_template.jinja", "1_Pooling/config.json"]
)
def test_links_to_outside_are_refused_before_anything_is_written(tmp_path, base, name):
    (tmp_path / "secret").write_text('{"password": "duck"}')
    file = base.directory / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="is a link that leads out of"):
        write(tmp_path / "out", [base])
    assert list((tmp_path / "out").iterdir()) == []
    if name in ("tokenizer_config.json", "chat_template.jinja"):
        with pytest.raises(CheckpointError, match="is a link that leads out of"):
            read_chat_template(base.directory)


def test_snapshots_of_the_hub_are_copied_through_their_links(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00").write_text('{"model_type": "llama"}')
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    checkpoint = StateDict({"w": torch.ones(1)}, "a")
    checkpoint.directory = snapshot
    out = write(tmp_path / "out", [checkpoint])
    assert not (out / "config.json").is_symlink()
    assert (out / "config.json").read_text() == '{"model_type": "llama"}'


def test_labels_are_shown_as_they_are_in_one_line():
    labels = ("a\n\n# Trust me", "b` <script>alert(1)</script> [click](http://x)", "``", "c\u2028d", "plain")
    card = render_card(Lineage("x\n---\nlicense: mit", labels, ("li`near",)))
    lines = card.split("\n")
    assert lines.count("---") == 2
    assert "# Trust me" not in lines
    assert "- `plain`" in lines
    assert "- ``b` <script>alert(1)</script> [click](http://x)``" in lines
    assert "- ``` `` ```" in lines
    assert "Base: `x --- license: mit`" in lines
    assert "``li`near``" in card
