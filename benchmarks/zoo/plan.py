"""Everything the zoo trains, in the order of what it is worth by the hour, with the minutes that each part takes.

Minutes are processor time on one thread of a 2-core server processor (AMD EPYC, AVX2). Those of ResNet20 with
BatchNorm, the MLPs and the text experts were measured; the others are extrapolated from a few steps on a busy machine,
those of the other networks on CIFAR-10 less about an eighth for its being busy. bfloat16 does not help there: without
AVX-512 a convolution takes 14 times as long as in float32, a matrix product 60 times.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.zoo.text_tasks import TASK_SETS, TASKS

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Job:
    """A program of the zoo with its options: one network, or a few short ones."""

    program: str
    options: tuple[str, ...]
    minutes: float

    @property
    def name(self) -> str:
        """The job as one word that a file can have as its name."""
        return "_".join((self.program, *(option.removeprefix("--") for option in self.options)))[:120]


def vision(arch: str, dataset: str, minutes: float, *seeds: int) -> Job:
    return Job("vision", ("--arch", arch, "--dataset", dataset, "--seeds", *map(str, seeds)), minutes * len(seeds))


def text(tasks: tuple[str, ...], minutes: float, seed: int) -> Job:
    return Job("text", ("--seeds", str(seed), "--tasks", *tasks), minutes)


#: The tasks of the sets of 14 and 20 that the set of eight lacks.
PARTS = tuple(name for name in TASK_SETS[20] if name not in TASKS)

PLAN = (
    vision("resnet20-bn", "cifar10", 38, 0),
    vision("mlp", "fashion_mnist", 1, *range(5)),
    vision("mlp", "mnist", 1, *range(5)),
    *(vision("resnet20-bn", "cifar10", 38, seed) for seed in (1, 2)),
    vision("cnn", "fashion_mnist", 4, *range(5)),
    text(TASKS, 5, 0),
    *(vision("resnet20-bn", "cifar10", 38, seed) for seed in (3, 4)),
    *(vision("vgg11-bn", "cifar10", 30, seed) for seed in SEEDS),
    Job("language", ("--seeds", "0"), 22),
    Job("image_experts", ("--seeds", "0"), 24),
    text(PARTS, 6, 0),
    *(vision("resnet20-ln", "cifar10", 43, seed) for seed in SEEDS),
    *(text(tasks, minutes, seed) for seed in (1, 2) for tasks, minutes in ((TASKS, 5), (PARTS, 6))),
    *(vision("vit", "cifar10", 36, seed) for seed in SEEDS),
    *(vision("resnet20-bn-2x", "cifar10", 110, seed) for seed in SEEDS),
    vision("mlp", "mnist", 1, *range(5, 20)),
    *(Job("image_experts", ("--seeds", str(seed)), 24) for seed in (1, 2)),
    *(vision("resnet20-ln-2x", "cifar10", 106, seed) for seed in SEEDS),
)
