"""The adaptive model on the modules people have: each expert alone is the expert, mixed batches are gathered."""

import pytest
import torch

from merganser.library import Library
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.choices import Routing
from support.timm_networks import vision_transformer

transformers = pytest.importorskip("transformers")


def bert():
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    batch = {"input_ids": torch.arange(12).reshape(3, 4), "attention_mask": mask}
    return transformers.BertModel(config), batch, lambda output: output.last_hidden_state


def clip():
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": 30,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "eos_token_id": 11,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
        projection_dim=8,
    )
    model = transformers.CLIPVisionModelWithProjection(config.vision_config)
    return model, {"pixel_values": torch.randn(3, 3, 8, 8)}, lambda output: output.image_embeds


def t5():
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    ids = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "decoder_input_ids": ids[:, :2], "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), batch, lambda output: output.logits


def timm_vit():
    model = vision_transformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=5)
    return model, {"x": torch.randn(3, 3, 8, 8)}, lambda output: output


@pytest.mark.parametrize("make", [bert, clip, t5, timm_vit])
def test_an_architecture(make, tmp_path):
    torch.manual_seed(0)
    module, batch, read = make()
    module.eval()
    base = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    experts = {}
    for task in "ab":
        moved = {}
        for name, parameter in module.named_parameters():
            delta = torch.randn(parameter.shape)
            if delta.dim() == 2:
                delta = torch.randn(delta.shape[0], 2) @ torch.randn(2, delta.shape[1]) / 2
            moved[name] = parameter.detach() + 0.1 * delta
        experts[task] = moved
    names = set(experts["a"])
    library = Library.build(
        {n: t for n, t in base.items() if n in names}, experts, tmp_path / "lib", rank_fraction=0.25
    )
    model = AdaptiveModel(module, library)
    assert not {"head", "lm_head", "visual_projection"} & set(model.router.layers), "output layers are not routed at"
    routed = model(batch)
    assert read(routed.output).shape[0] == 3
    mixed = Routing(
        ("a", "b"),
        torch.full((3, 2), 0.5),
        (frozenset("a"), frozenset("b"), frozenset("a")),
        torch.zeros(3, dtype=torch.bool),
    )
    found = read(model(batch, routing=mixed).output)
    for task, samples in (("a", [0, 2]), ("b", [1])):
        module.load_state_dict(library.expert(task).state_dict(), strict=False)
        with torch.no_grad():
            expected = read(Inputs.of(batch).run(module))
        module.load_state_dict(base)
        torch.testing.assert_close(found[samples], expected[samples], atol=2e-4, rtol=1e-3)
