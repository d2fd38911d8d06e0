"""Every page of the results and its sections in their order: the stored record of each, its title, what makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.reporting.parts import Part
from benchmarks.reporting.plain import tables
from benchmarks.reporting.sections import (
    adaptive,
    atm,
    auto,
    compression,
    differing,
    evolution,
    evolution_costs,
    evolution_memory,
    evolution_racing,
    evolution_skills,
    forgetting,
    mergeability,
    multi_task,
    numerics,
    peers,
    single_task,
    single_task_extras,
    speed,
    theory,
    transformers,
)


@dataclass(frozen=True)
class Section:
    record: str
    title: str
    make: Callable[[Any], Iterable[Part]]


@dataclass(frozen=True)
class Page:
    """A page of the results, stored as docs/results/NAME.md."""

    name: str
    title: str
    sections: tuple[Section, ...]


PAGES = (
    Page(
        "alignment",
        "Networks trained apart",
        (
            Section("single_task_mlp", "One task: MLPs on MNIST", single_task.section("mlp")),
            Section("single_task_mlp-fashion", "One task: MLPs on Fashion-MNIST", single_task.section("mlp-fashion")),
            Section(
                "single_task_cnn-fashion", "One task: small CNNs on Fashion-MNIST", single_task.section("cnn-fashion")
            ),
            Section("single_task_resnet20-bn", "One task: ResNet20 on CIFAR-10", single_task.section("resnet20-bn")),
            Section(
                "single_task_resnet20-bn-2x",
                "One task: ResNet20 of twice the width on CIFAR-10",
                single_task.section("resnet20-bn-2x"),
            ),
            Section(
                "single_task_resnet20-ln",
                "One task: ResNet20 with LayerNorm on CIFAR-10",
                single_task.section("resnet20-ln"),
            ),
            Section("single_task_vgg11-bn", "One task: VGG11 on CIFAR-10", single_task.section("vgg11-bn")),
            Section("single_task_vit", "One task: patch transformers on CIFAR-10", single_task.section("vit")),
            Section("alignment_transformers", "One task: small transformers", transformers.parts),
            Section("single_task_extras", "One task: smaller questions", single_task_extras.mlps),
            Section(
                "single_task_extras_resnet20-bn",
                "One task: smaller questions about ResNet20",
                single_task_extras.resnets,
            ),
            Section(
                "single_task_extras_resnet20-bn-2x",
                "One task: ensembles of wide ResNet20",
                partial(single_task_extras.sampled, "ResNet20 of twice the width on CIFAR-10"),
            ),
            Section(
                "single_task_extras_cnn-fashion",
                "One task: ensembles of small CNNs",
                partial(single_task_extras.sampled, "small CNNs without normalisation on Fashion-MNIST"),
            ),
            Section("alignment", "Speed of alignment", numerics.alignment),
        ),
    ),
    Page(
        "experts",
        "Experts of several tasks",
        (
            Section("multi_task", "Several tasks: text experts in one encoder", multi_task.parts),
            Section("multi_task_images", "Several tasks: image experts in one backbone", multi_task.image_parts),
            Section("compression", "Compression: experts in few bytes", compression.parts),
            Section("compression_20", "Compression: twenty experts", compression.parts),
            Section("adaptive", "Adaptive: one model for inputs of unknown task", adaptive.parts),
            Section("mergeability", "Mergeability: guessing the cost of a merge", mergeability.parts),
            Section("auto", "The autopilot: a full grid for a tenth of its questions", auto.parts),
            Section("auto_images", "The autopilot on image experts", auto.parts),
            Section("auto_language", "The autopilot on language models", auto.parts),
            Section("auto_simulations", "The autopilot in simulated exams", auto.simulated),
            Section("theory", "Theory: task vectors as gradients", theory.parts),
            Section("atm", "Theory: alternating tuning and merging", atm.parts),
            Section("forgetting", "Forgetting: a new skill against earlier ones", forgetting.parts),
        ),
    ),
    Page(
        "evolution",
        "Evolution and evaluation",
        (
            Section("evolve_costs", "What a winner costs, on real models", evolution_costs.parts),
            Section("evolve_memory", "Memory of workers, and fewer bits", evolution_memory.parts),
            Section("evolve_skills", "Two skills in one language model", evolution_skills.parts),
            Section("evolve_racing", "Racing: what a winner costs", evolution_racing.parts),
            Section("evolve", "Evolution: few evaluations", evolution.section("evolve")),
            Section("evolve_language", "Evolution: a small language model", evolution.section("evolve_language")),
            Section("irt", "Item response theory", numerics.irt),
        ),
    ),
    Page(
        "differing",
        "Networks that differ",
        (
            Section("zip", "Other classes, widths and depths", differing.zipped),
            Section("transplant", "Another tokenizer", differing.transplant),
            Section("moe", "Dense models as the experts of one", differing.mixtures),
            Section("transport", "Fine-tunes on another base", differing.transport),
        ),
    ),
    Page(
        "speed",
        "Speed and memory",
        (
            Section("merge_speed", "Speed of merging", speed.parts),
            Section("taskvectors", "Speed of task-vector expressions", speed.task_vectors),
            Section("lowrank", "Decompositions", numerics.lowrank),
        ),
    ),
    Page(
        "peers",
        "Compared with other programs",
        (
            Section("peers", "Other programs", peers.parts),
            Section("parity", "Parity with mergekit", speed.parity),
            Section("parity_dialect", "Parity with mergekit's dialect", speed.dialect),
        ),
    ),
)
SECTIONS = tuple(section for page in PAGES for section in page.sections)


def others(known: Iterable[str]) -> Page:
    """A page for records that no section above is made from."""
    named = {section.record for section in SECTIONS}
    titles = {record: record.replace("_", " ").capitalize() for record in sorted(known) if record not in named}
    sections = (Section(record, title, tables) for record, title in titles.items())
    return Page("more", "Further measurements", tuple(sections))
