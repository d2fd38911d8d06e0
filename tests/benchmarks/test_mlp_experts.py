"""Experts of an MLP: the trunk is the network without its head, and experts answer through heads of their own."""

from __future__ import annotations

import pytest
import torch

from benchmarks import mlp_experts
from benchmarks.mlp_experts import MLPExperts, SmallImages, Trunk
from benchmarks.zoo.architectures import MLP
from benchmarks.zoo.image_tasks import ImageTask


@pytest.fixture(scope="module")
def task() -> ImageTask:
    """Whether the upper half of an image is bright."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(96) % 2
    images = torch.randint(0, 60, (96, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images[:, :, :14] += (100 * labels)[:, None, None, None].byte()
    parts = SmallImages(images, labels)
    return ImageTask("bright", 2, parts, parts.head(16), parts.head(32))


def test_an_expert_learns_its_task_and_leaves_the_base(task: ImageTask) -> None:
    torch.manual_seed(0)
    whole = MLP()
    base = {name: value.clone() for name, value in whole.state_dict().items() if not name.startswith("head.")}
    expert, head = mlp_experts.train(task, base, seed=0)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in base.items())
    assert expert.keys() == base.keys()
    experts = MLPExperts(base, {"bright": expert}, {"bright": task}, {"bright": head})
    assert experts.own_scores(experts.experts)["bright"] > 0.9


def test_the_trunk_is_the_network_before_its_head(task: ImageTask) -> None:
    torch.manual_seed(0)
    whole = MLP().eval()
    trunk = Trunk()
    trunk.load_state_dict({name: value for name, value in whole.state_dict().items() if not name.startswith("head.")})
    images, labels = task.test.batch(slice(0, 4))
    assert images.min() >= -1
    assert images.max() <= 1
    assert labels.tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(torch.log_softmax(whole.head(trunk(images)), 1), whole(images))
