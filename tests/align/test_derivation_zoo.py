"""Models nobody here wrote: the derived freedom is the whole known one."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest
import torch
from torch import nn

from merganser.align import Symmetry, symmetry


def shapes(found: Symmetry) -> Counter[tuple[int, ...]]:
    return Counter(found.shape(name) for name in found.atoms)


def test_resnet50(timm: ModuleType) -> None:
    """A stem, four residual streams, two inner widths for each of 3 + 4 + 6 + 3 bottlenecks."""
    found = symmetry(timm.create_model("resnet50", num_classes=10), torch.randn(1, 3, 32, 32))
    expected = Counter({(64,): 1 + 2 * 3, (128,): 2 * 4, (256,): 1 + 2 * 6, (512,): 1 + 2 * 3, (1024,): 1, (2048,): 1})
    assert shapes(found) == expected
    moved = {(name, dim) for name, axes in found.axes.items() for dim, _ in enumerate(axes) if found.free(name)}
    assert {("bn1.running_var", 0), ("layer3.2.bn3.running_mean", 0)} <= moved
    assert not found.free("bn1.num_batches_tracked")


def test_vit(timm: ModuleType) -> None:
    """The residual stream; in each block heads, d_qk and d_v inside them, and the MLP."""
    net = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=32, patch_size=8, num_classes=10)
    found = symmetry(net, torch.randn(1, 3, 32, 32))
    assert shapes(found) == Counter({(192,): 1, (3,): 3, (3, 64): 6, (768,): 3})
    assert found.atoms["blocks.0.attn.qkv:d_v"].parent == "blocks.0.attn.qkv:head"
    assert not found.free("head.bias")


def test_resnext_densenet_mixer_and_convnext(timm: ModuleType) -> None:
    image = torch.randn(1, 3, 32, 32)
    small = {"num_classes": 4}
    resnext = timm.create_model("resnext26ts", **small)
    assert any(name.endswith(":group") for name in symmetry(resnext, image).atoms)
    dense = timm.models.densenet.DenseNet(growth_rate=8, block_config=(2, 3), **small)
    # The stem, bottleneck and growth of five layers, the transition.
    assert len(symmetry(dense, image).atoms) == 1 + 2 * 5 + 1
    convnext = timm.create_model("convnext_atto", depths=(1, 1, 1, 1), **small)
    assert len(symmetry(convnext, image).atoms) == 4 + 4
    mixer = timm.models.MlpMixer(img_size=32, patch_size=8, num_blocks=2, embed_dim=24, **small)
    # The stream, and two MLPs in each block (tokens are the input's).
    assert len(symmetry(mixer, image).atoms) == 1 + 2 * 2


def transformer_freedom(layers: int, stream: int, heads: int, inner: int, mlp: int) -> Counter[tuple[int, ...]]:
    return Counter({(stream,): 1, (heads,): layers, (heads, inner): 2 * layers, (mlp,): layers})


def test_bert(transformers: ModuleType) -> None:
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
    )
    tokens = torch.randint(40, (2, 9))
    expected = transformer_freedom(2, 32, 4, 8, 48)
    assert shapes(symmetry(transformers.BertForMaskedLM(config), tokens)) == expected
    classifier = transformers.BertForSequenceClassification(config)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert shapes(symmetry(classifier, inputs)) == expected + Counter({(32,): 1})  # the pooler


def test_an_encoder_that_returns_its_stream_has_it_pinned(transformers: ModuleType) -> None:
    """MiniLM as sentence-transformers uses it: the embedding is the output."""
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48
    )
    net = transformers.BertModel(config, add_pooling_layer=False)
    found = symmetry(net, torch.randint(40, (2, 9)))
    assert shapes(found) == Counter({(3,): 2, (3, 8): 4, (48,): 2})


def test_gpt2(transformers: ModuleType) -> None:
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    found = symmetry(transformers.GPT2LMHeadModel(config), torch.randint(40, (2, 9)))
    assert shapes(found) == transformer_freedom(2, 32, 4, 8, 128)
    assert found.aliases == {"lm_head.weight": "transformer.wte.weight"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama(transformers: ModuleType, attention: str) -> None:
    """Rotary positions pin d_qk; two kv heads change places, and four query heads inside each group."""
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attn_implementation=attention,
    )
    found = symmetry(transformers.LlamaForCausalLM(config), torch.randint(40, (2, 9)))
    assert shapes(found) == Counter({(32,): 1, (2,): 2, (2, 4): 2 * 2, (48,): 2})
    (segment,) = found.axes["model.layers.0.self_attn.k_proj.weight"][0]
    assert [f.atom is None for f in segment.factors] == [False, True]


def test_fused_and_partly_rotary_attention(transformers: ModuleType) -> None:
    """GPT-NeoX: q, k, v inside each head, a quarter of d_qk rotary; Phi-3: q, k, v and gate, up in blocks."""
    tokens = torch.randint(40, (2, 9))
    common = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    neox = transformers.GPTNeoXConfig(num_attention_heads=4, max_position_embeddings=16, **common)
    found = symmetry(transformers.GPTNeoXForCausalLM(neox), tokens)
    assert shapes(found) == Counter({(32,): 1, (4,): 1, (4, 6): 1, (4, 8): 1, (48,): 1})
    phi = transformers.Phi3Config(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **common)
    found = symmetry(transformers.Phi3ForCausalLM(phi), tokens)
    assert shapes(found) == Counter({(32,): 1, (2,): 1, (2, 2): 1, (2, 8): 1, (48,): 1})


def test_multi_query_attention(transformers: ModuleType) -> None:
    """Falcon: all query heads share one key and one value, picked from the fused projection by fixed positions."""
    config = transformers.FalconConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False, multi_query=True
    )
    found = symmetry(transformers.FalconForCausalLM(config), torch.randint(40, (2, 9)))
    assert shapes(found) == Counter({(32,): 1, (4,): 2, (128,): 2})


def test_heads_with_a_slope_of_their_own_keep_their_place(transformers: ModuleType) -> None:
    """BLOOM: heads are told apart by their slopes, the channels inside each move."""
    config = transformers.BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=4)
    found = symmetry(transformers.BloomForCausalLM(config), torch.randint(40, (1, 9)))
    assert shapes(found) == Counter({(32,): 1, (8,): 2 * 4, (128,): 1})


def test_tracing_leaves_the_module_as_it_was(timm: ModuleType) -> None:
    net = timm.create_model("resnet18", num_classes=4)
    net.layer1.eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    symmetry(net, torch.randn(1, 3, 32, 32))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert net.training
    assert not net.layer1.training
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in net.parameters())
