"""Extracted adapters in PEFT: at full rank, the base with the adapter is the fine-tuned model."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from merganser.checkpoints.opening import open as open_checkpoint
from merganser.errors import InputError
from merganser.library import extract_lora, merge_adapters

peft = pytest.importorskip("peft")
try:
    import transformers
except (ImportError, RuntimeError) as error:
    pytest.skip(f"transformers cannot be imported here: {error}", allow_module_level=True)

GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
      "relative_attention_num_buckets": 8}  # fmt: skip
LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 3}  # fmt: skip
BERT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 16, "num_labels": 3}  # fmt: skip
#: Class, settings, what the adapter is for, a module that must be in it, and one that must not.
UNTIED = {"tie_word_embeddings": False}
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
DENSE = "bert.encoder.layer.0.output.dense"
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2, "CAUSAL_LM", "transformer.h.0.attn.c_proj", "transformer.wte"),
    "t5": ("T5ForConditionalGeneration", T5, "SEQ_2_SEQ_LM", BIAS, "shared"),
    "llama": ("LlamaForCausalLM", LLAMA | UNTIED, "CAUSAL_LM", "lm_head", "model.norm"),
    "llama, embeddings": ("LlamaForCausalLM", LLAMA | UNTIED, "CAUSAL_LM", "model.embed_tokens", "model.norm"),
    "llama, tied": (
        "LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}, "CAUSAL_LM", "model.layers.1.mlp.up_proj",
        "model.embed_tokens",
    ),
    "llama classifier": (
        "LlamaForSequenceClassification", LLAMA, "SEQ_CLS", "model.layers.0.mlp.up_proj", "model.norm",
    ),
    "bert": ("BertModel", BERT, "FEATURE_EXTRACTION", "embeddings.word_embeddings", "embeddings.LayerNorm"),
    "bert classifier": ("BertForSequenceClassification", BERT, "SEQ_CLS", DENSE, "classifier"),
    "bert tokens": ("BertForTokenClassification", BERT, "TOKEN_CLS", DENSE, "classifier"),
    "bert answers": ("BertForQuestionAnswering", BERT | {"num_labels": 2}, "QUESTION_ANS", DENSE, "qa_outputs"),
}  # fmt: skip


def make(name, path):
    kind, settings, *_ = MODELS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**settings)).eval()
    model.save_pretrained(path)
    return model


def tune(model, leave, whole=False):
    """Change the weights an adapter can hold, norms and biases among them, or all of them."""
    torch.manual_seed(1)
    tied = model.get_output_embeddings() is None or model.config.tie_word_embeddings
    lookups = {id(model.get_input_embeddings().weight)} if tied and leave else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if whole or (id(parameter) not in lookups and not name.startswith("shared")):
                parameter += 0.05 * torch.randn(parameter.shape)


def outputs(model, name):
    ids = torch.arange(1, 13).reshape(2, 6)
    given = {"decoder_input_ids": ids.flip(1)} if name.startswith("t5") else {}
    with torch.no_grad():
        found = model(input_ids=ids, **given)
    return found[0]


@pytest.mark.parametrize("name", MODELS)
def test_at_full_rank_peft_gives_the_finetuned_model(name, tmp_path):
    kind, _, task, inside, outside = MODELS[name]
    model = make(name, tmp_path / "base")
    causal = task in ("CAUSAL_LM", "SEQ_2_SEQ_LM")
    tune(model, leave=causal)
    model.save_pretrained(tmp_path / "tuned")
    report = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=40, dtype="float32")
    assert report.left_out == ()
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert config["task_type"] == task
    assert inside in config["target_modules"]
    assert report.residual < 1e-4
    assert outside not in config["target_modules"]
    base = getattr(transformers, kind).from_pretrained(tmp_path / "base").eval()
    before = outputs(base, name)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        served = peft.PeftModel.from_pretrained(base, tmp_path / "lora").eval()
    assert not torch.allclose(before, outputs(model, name), atol=1e-3)
    torch.testing.assert_close(outputs(served, name), outputs(model, name), atol=2e-5, rtol=1e-4)
    adapted = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'lora'}")
    for tensor in open_checkpoint(tmp_path / "tuned").names():
        torch.testing.assert_close(
            adapted.read(tensor).float(), open_checkpoint(tmp_path / "tuned").read(tensor), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("gpt2", {"transformer.wte.weight"}),
        ("t5", {"shared.weight"}),
        ("llama, tied", {"model.embed_tokens.weight"}),
    ],
)
def test_what_has_no_place_in_an_adapter_is_named(name, left_out, tmp_path):
    model = make(name, tmp_path / "base")
    tune(model, leave=False, whole=True)
    model.save_pretrained(tmp_path / "tuned")
    report = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=40)
    assert left_out == set(report.left_out)
    assert report.energy < 1
    tuned, base = open_checkpoint(tmp_path / "tuned"), open_checkpoint(tmp_path / "base")
    adapted = open_checkpoint(f"{tmp_path / 'base'}+{tmp_path / 'lora'}")
    lost, seen = (
        sum(float((tuned.read(each).double() - other.read(each).double()).square().sum()) for each in tuned.names())
        for other in (adapted, base)
    )
    assert report.residual == pytest.approx((lost / seen) ** 0.5, rel=1e-3)
    thin = extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "thin", rank=40, whole=False)
    assert left_out < set(thin.left_out)
    assert thin.whole == ()


def test_a_bare_gpt2_gets_the_names_of_the_class_with_a_head(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make("gpt2", tmp_path / "base")
    tune(model, leave=True)
    model.save_pretrained(tmp_path / "tuned")
    for each in ("base", "tuned"):
        file = tmp_path / each / "model.safetensors"
        names = {key.removeprefix("transformer."): tensor for key, tensor in load_file(file).items()}
        save_file(names, file, {"format": "pt"})
    extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=40, dtype="float32")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base").eval()
    served = peft.PeftModel.from_pretrained(base, tmp_path / "lora").eval()
    torch.testing.assert_close(outputs(served, "gpt2"), outputs(model, "gpt2"), atol=2e-5, rtol=1e-4)


def test_adapters_with_embeddings_merge_to_one_with_embeddings(tmp_path):
    name = "llama, embeddings"
    model = make(name, tmp_path / "base")
    tune(model, leave=False)
    model.save_pretrained(tmp_path / "tuned")
    extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora", rank=40, dtype="float32")
    merge_adapters([tmp_path / "lora"], tmp_path / "merged", method="linear", dtype="float32")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    served = peft.PeftModel.from_pretrained(base, tmp_path / "merged").eval()
    torch.testing.assert_close(outputs(served, name), outputs(model, name), atol=1e-4, rtol=1e-3)


def test_a_change_that_no_adapter_holds_is_refused(tmp_path):
    model = make("gpt2", tmp_path / "base")
    with torch.no_grad():
        model.transformer.ln_f.weight += 1
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(InputError, match="no weight that an adapter can change differs"):
        extract_lora(tmp_path / "tuned", tmp_path / "base", tmp_path / "lora")
