"""Image tasks and experts of the zoo: variants, the backbone's names and padding, training and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.zoo import efficientnet, image_experts
from benchmarks.zoo.image_tasks import IMAGE_TASKS, Images, ImageTask, Variant, apply
from benchmarks.zoo.images import Split


def some(count: int = 40, channels: int = 1, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 8, 8, channels), generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(count) % 10, torch.zeros(channels), torch.ones(channels))


def test_variants_change_images_and_classes() -> None:
    split = some()
    plain = split.images.permute(0, 3, 1, 2)
    inverted = apply(Variant("mnist", inverted=True), split)
    assert torch.equal(inverted.images, 255 - plain)
    parity = apply(IMAGE_TASKS["digits-parity"], split)
    assert torch.equal(parity.labels, split.labels % 2)
    animals = apply(IMAGE_TASKS["animals"], split)
    kept = (split.labels >= 2) & (split.labels <= 7)
    assert torch.equal(animals.images, plain[kept])
    assert torch.equal(animals.labels, split.labels[kept] - 2)
    turned = apply(IMAGE_TASKS["digits-turned"], split)
    for image, label, original in zip(turned.images, turned.labels.tolist(), plain, strict=True):
        assert torch.equal(image.rot90(-label, (1, 2)), original)


def test_no_two_tasks_are_the_same() -> None:
    assert len(IMAGE_TASKS) >= 8
    assert len(set(IMAGE_TASKS.values())) == len(IMAGE_TASKS)


def test_batches_are_in_colour_and_within_one() -> None:
    inputs, labels = apply(Variant("mnist"), some()).batch(slice(0, 6))
    assert inputs.shape == (6, 3, 64, 64)
    assert torch.equal(inputs[:, 0], inputs[:, 2])
    assert inputs.abs().max() <= 1
    assert labels.tolist() == list(range(6))


@pytest.mark.parametrize(("side", "kernel", "stride"), [(8, 3, 2), (7, 3, 2), (8, 5, 2), (5, 5, 1), (9, 3, 1)])
def test_padding_is_tensorflows(side: int, kernel: int, stride: int) -> None:
    layer = efficientnet.NormalisedConvolution(2, 3, kernel, stride).eval()
    x = torch.randn(1, 2, side, side)
    outputs = -(-side // stride)
    total = max((outputs - 1) * stride + kernel - side, 0)
    before = total // 2
    padded = F.pad(x, (before, total - before, before, total - before))
    expected = F.conv2d(padded, layer.conv.weight, stride=stride)
    assert layer(x).shape[-1] == outputs
    torch.testing.assert_close(layer(x), expected / (1 + 1e-3) ** 0.5)


def test_names_of_the_package_become_ours() -> None:
    """Undo the renaming for all of our tensors, add a classifier, and rename."""
    state = efficientnet.EfficientNetLite0().state_dict()
    theirs = {"_fc.weight": torch.zeros(1000, 1280)}
    roots = {"stem.conv": "_conv_stem", "stem.norm": "_bn0", "last.conv": "_conv_head", "last.norm": "_bn1"}
    inner = {"expand.conv": "_expand_conv", "expand.norm": "_bn0", "depthwise.conv": "_depthwise_conv"}
    inner |= {"depthwise.norm": "_bn1", "project.conv": "_project_conv", "project.norm": "_bn2"}
    for name, value in state.items():
        if name.startswith("blocks."):
            _, number, *middle, last = name.split(".")
            theirs[f"_blocks.{number}.{inner['.'.join(middle)]}.{last}"] = value
        else:
            root, last = name.rsplit(".", 1)
            theirs[f"{roots[root]}.{last}"] = value
    found = efficientnet.rename(theirs)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


class Tiny(nn.Module):
    """A backbone of one convolution with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.norm = nn.Conv2d(3, 6, 8, stride=8), nn.BatchNorm2d(6)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(images))).mean((2, 3))


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ImageTask:
    """Dark and bright images."""
    monkeypatch.setattr(image_experts, "load_backbone", lambda: Tiny().eval())
    monkeypatch.setattr(image_experts, "FEATURES", 6)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 2
    images = torch.randint(0, 128, (60, 1, 8, 8), generator=generator) + 127 * labels[:, None, None, None]
    parts = Images(images.to(torch.uint8), labels)
    return ImageTask("toy", 2, parts, parts.head(10), parts)


SCHEDULE = image_experts.ImageSchedule(epochs=4, rate=3e-2, batch=8)


def test_expert_is_trained_with_the_base_statistics(task: ImageTask, tmp_path: Path) -> None:
    card = image_experts.train(task, 0, SCHEDULE, tmp_path)
    assert card.scores["test_accuracy"] > 0.9
    directory = image_experts.expert_directory(tmp_path, "toy")
    assert sorted(path.name for path in directory.iterdir()) == ["card.json", "head.safetensors", "model.safetensors"]
    base, trained = Tiny().state_dict(), load_file(directory / "model.safetensors")
    assert torch.equal(trained["norm.running_mean"], base["norm.running_mean"])
    assert not torch.equal(trained["norm.weight"], base["norm.weight"])
    model = Tiny()
    model.load_state_dict(trained)
    head = image_experts.load_head("toy", 0, tmp_path)
    assert image_experts.accuracy(model, head, task.test) == card.scores["test_accuracy"]
    base_accuracy = image_experts.accuracy(Tiny(), head, task.test)
    assert card.guards["base_share"] == pytest.approx(base_accuracy / card.scores["test_accuracy"])


def test_an_interrupted_expert_ends_like_a_whole_one(
    task: ImageTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_experts.train(task, 0, SCHEDULE, tmp_path / "whole")
    accuracy, calls = image_experts.accuracy, []

    def interrupted(*arguments: object) -> float:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return accuracy(*arguments)

    monkeypatch.setattr(image_experts, "accuracy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        image_experts.train(task, 0, SCHEDULE, tmp_path / "parts")
    monkeypatch.setattr(image_experts, "accuracy", accuracy)
    image_experts.train(task, 0, SCHEDULE, tmp_path / "parts")
    whole, parts = (
        load_file(image_experts.expert_directory(tmp_path / name, "toy") / "model.safetensors")
        for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
