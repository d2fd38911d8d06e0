"""The zoo's architectures: they trace, they have the thesis' shapes, and permuting channels is harmless to the norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.architectures import ARCHITECTURES, CNN, VGG11, ChannelLayerNorm, ResNet20, build
from benchmarks.zoo.vit import ViT
from merganser import align
from merganser.errors import InputError


def example(name: str, batch: int = 2) -> Tensor:
    shape = (1, 28, 28) if name in ("mlp", "cnn") else (3, 32, 32)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_traces_and_keeps_its_output(name: str) -> None:
    torch.manual_seed(0)
    model = build(name).eval()
    images = example(name)
    program = torch.export.export(model, (images,))
    torch.testing.assert_close(program.module()(images), model(images))
    assert model(images).shape == (2, 10)


def test_shapes_of_the_thesis() -> None:
    weights = [p.shape for p in build("mlp").parameters() if p.ndim == 2]
    assert [tuple(shape) for shape in weights] == [(256, 784), (512, 256), (512, 512), (256, 512), (10, 256)]
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in build("resnet20-ln").modules()) == 19
    assert build("resnet20-bn-2x").head.in_features == 128
    convolutions = [m.out_channels for m in build("vgg11-bn").modules() if isinstance(m, nn.Conv2d)]
    assert convolutions == [32, 64, 128, 128, 256, 256, 256, 256]
    assert len(build("vit").blocks) >= 6


@pytest.mark.parametrize(("name", "atom"), [("cnn", "hidden"), ("vgg11-bn", "features.0"), ("vit", "blocks.5.expand")])
def test_their_symmetry_is_found(name: str, atom: str) -> None:
    """The derivation tests itself: permuted networks compute the same."""
    found = align.symmetry(build(name).eval(), (example(name),))
    assert atom in found.atoms


def test_mlp_gives_log_probabilities() -> None:
    total = build("mlp")(example("mlp")).exp().sum(1)
    torch.testing.assert_close(total, torch.ones(2))


def test_channel_layer_norm_commutes_with_channel_permutations() -> None:
    norm = ChannelLayerNorm(6)
    x = torch.randn(2, 6, 3, 3)
    order = torch.randperm(6)
    torch.testing.assert_close(norm(x)[:, order], norm(x[:, order]))
    pixel = x[0, :, 1, 2]
    expected = (pixel - pixel.mean()) / (pixel.var(unbiased=False) + norm.eps).sqrt()
    torch.testing.assert_close(norm(x)[0, :, 1, 2], expected)


@pytest.mark.parametrize(
    "model",
    [build("mlp"), CNN(3), ResNet20(nn.BatchNorm2d), ResNet20(ChannelLayerNorm), VGG11(nn.BatchNorm2d, 1 / 8), ViT()],
    ids=["mlp", "cnn", "resnet20-bn", "resnet20-ln", "narrow-vgg11", "vit"],
)
def test_learns_a_tiny_batch(model: nn.Module) -> None:
    torch.manual_seed(0)
    images = example("mlp" if hasattr(model, "layers") else "resnet20", batch=8)
    images += 2 * torch.randn(8, images.shape[1], 1, 1)  # each picture has its own brightness or colour
    labels = torch.arange(8)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(25):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_unknown_name_suggests() -> None:
    with pytest.raises(InputError, match="resnet20-bn"):
        build("resnet20-bm")
