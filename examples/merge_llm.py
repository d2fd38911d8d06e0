"""Merge language models with five recipes, load each result in transformers and generate with it.

The models are tiny Llamas with random weights. To merge real models, change only the paths in the recipes. Needs the
`hf` extra.

    python examples/merge_llm.py merged-llms
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import merganser as mg

RECIPES = Path(__file__).parent / "recipes"


def make_models(directory: Path) -> None:
    """A base, and three models that moved away from it as fine-tuning would have moved them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    base = LlamaForCausalLM(config)
    base.save_pretrained(directory / "base")
    for name in ("math", "code", "law"):
        model = LlamaForCausalLM(config)
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(directory / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", nargs="?", type=Path, default=Path("merged-llms"))
    out = parser.parse_args().out
    out.mkdir(parents=True)
    make_models(out)
    prompt = torch.tensor([[1, 5, 9]])
    for recipe in sorted(RECIPES.glob("*.yml")):
        shutil.copy(recipe, out)  # paths in a recipe are relative to it
        merged = mg.run(out / recipe.name, out / recipe.stem)
        model = AutoModelForCausalLM.from_pretrained(merged)
        tokens = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()
        print(f"{recipe.stem:<22} {model.config.num_hidden_layers} layers, generates {tokens}")


if __name__ == "__main__":
    main()
