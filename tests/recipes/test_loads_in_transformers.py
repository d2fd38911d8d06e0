"""What a recipe makes loads in transformers and generates: vocabularies, slices, tied heads, nested merges."""

from __future__ import annotations

import pytest
import torch

from merganser.recipes.running import run

tokenizers = pytest.importorskip("tokenizers")
try:
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )
except (ImportError, RuntimeError) as error:
    pytest.skip(f"transformers cannot be imported here: {error}", allow_module_level=True)


def tokenizer(added):
    plain = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<unk>", "<s>", "</s>"], vocab_size=50, show_progress=False
    )
    plain.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_tokens(added, special_tokens=True)
    return fast


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`base` with four padding rows, `a` and `b` with tokens of their own; `tied` and `tied_a` with tied heads."""
    root = tmp_path_factory.mktemp("models")
    cases = {
        "base": ([], 4, False),
        "a": (["<|a|>"], 0, False),
        "b": (["<|b|>", "<|a|>"], 0, False),
        "tied": ([], 0, True),
        "tied_a": (["<|a|>"], 0, True),
    }
    for seed, (name, (added, padding, tied)) in enumerate(cases.items()):
        torch.manual_seed(seed)
        own = tokenizer(added)
        config = LlamaConfig(
            vocab_size=len(own) + padding,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
        LlamaForCausalLM(config).save_pretrained(root / name)
        own.save_pretrained(root / name)
    return root


#: A recipe -> rows beyond the base tokenizer's, layers, dtype, and whether it knows <|a|>.
RECIPES = {
    "union": (
        "method: ties\nbase: base\nmodels: [a, b]\n"
        "output: {tokenizer: union, dtype: bfloat16, chat_template: chatml}\n",
        (4, 4, torch.bfloat16, True),
    ),
    "stacked": (
        "merge_method: passthrough\nslices:\n"
        " - sources: [{model: a, layer_range: [0, 3]}]\n"
        " - sources: [{model: b, layer_range: [1, 4]}]\n"
        "tokenizer_source: base\n",
        (1, 6, torch.float32, True),
    ),
    "tied": ("method: linear\nmodels: [tied, tied_a]\noutput: {tokenizer: union}\n", (1, 4, torch.float32, True)),
    "named": (
        "method: linear\nmodels: [base, a]\noutput: {tokenizer: {source: a, pad_to_multiple_of: 64}}\n",
        (None, 4, torch.float32, True),
    ),
    "nested": (
        "method: slerp\nparameters: {t: [0, 1]}\nmodels:\n - base\n"
        " - {method: linear, base: base, models: [base, b], output: {tokenizer: base}}\n",
        (4, 4, torch.float32, False),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_result_loads_and_generates(models, tmp_path, name):
    text, (extra, layers, dtype, knows) = RECIPES[name]
    recipe = models / f"{name}.yml"
    recipe.write_text(text)
    out = run(recipe, tmp_path / "out")
    model, own = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    rows = 64 if extra is None else len(tokenizer([])) + extra
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == rows
    assert model.config.num_hidden_layers == len(model.model.layers) == layers
    assert model.dtype is dtype
    assert model.config.tie_word_embeddings == (name == "tied")
    assert (own.convert_tokens_to_ids("<|a|>") != own.unk_token_id) == knows
    ids = own("the quick<|a|> fox", return_tensors="pt").input_ids
    assert int(ids.max()) < rows
    made = model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)
    assert made.shape[1] == ids.shape[1] + 2
    if name == "union":
        chat = own.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "<|im_start|>user\nhi<|im_end|>\n"
