"""Three tiny Llamas with a word-level tokenizer, and questions for them."""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
WORDS = [f"w{i}" for i in range(40)] + [str(i) for i in range(10)] + ["Question", "Answer", ":"]


@pytest.fixture(scope="session")
def transformers():
    """transformers, also beside a torchvision whose operators do not load here: those its import names are declared."""
    import torch

    pytest.importorskip("transformers")
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("transformers")


@pytest.fixture(scope="session")
def llamas(tmp_path_factory, transformers):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("llamas")
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config)
    for name in ("base", "math", "code"):
        model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(base.state_dict())
        if name != "base":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.3 * torch.randn_like(parameter) * parameter.std().nan_to_num(1.0)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    import random

    generator = random.Random(0)
    with (folder / "quiz.jsonl").open("w") as file:
        for number in range(60):
            words = generator.sample(WORDS[:40], 6)
            record = {"question": " ".join(words[:3]), "options": words[3:], "answer": number % 3, "topic": number % 4}
            file.write(json.dumps(record) + "\n")
    with (folder / "sums.jsonl").open("w") as file:
        for number in range(30):
            file.write(json.dumps({"question": f"w{number} w1", "answer": f"so it is {number % 10}"}) + "\n")
    with (folder / "texts.tsv").open("w") as file:
        for number in range(30):
            file.write(f"{number % 2}\t{' '.join(generator.sample(WORDS[:40], 5))}\n")
    return folder
