"""Every section of the results in its order: the stored record it is made from, its title, and what makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting.parts import Part
from benchmarks.reporting.plain import tables
from benchmarks.reporting.sections import (
    adaptive,
    compression,
    evolution,
    mergeability,
    multi_task,
    numerics,
    peers,
    single_task,
    single_task_extras,
    speed,
    theory,
)


@dataclass(frozen=True)
class Section:
    record: str
    title: str
    make: Callable[[Any], Iterable[Part]]


SECTIONS = (
    Section("single_task_mlp", "One task: MLPs on MNIST", single_task.section("mlp")),
    Section("single_task_mlp-fashion", "One task: MLPs on Fashion-MNIST", single_task.section("mlp-fashion")),
    Section("single_task_cnn-fashion", "One task: small CNNs on Fashion-MNIST", single_task.section("cnn-fashion")),
    Section("single_task_resnet20-bn", "One task: ResNet20 on CIFAR-10", single_task.section("resnet20-bn")),
    Section("single_task_extras", "One task: smaller questions", single_task_extras.parts),
    Section("multi_task", "Several tasks: text experts in one encoder", multi_task.parts),
    Section("compression", "Compression: experts in few bytes", compression.parts),
    Section("adaptive", "Adaptive: one model for inputs of unknown task", adaptive.parts),
    Section("theory", "Theory: task vectors as gradients", theory.parts),
    Section("mergeability", "Mergeability: guessing the cost of a merge", mergeability.parts),
    Section("evolve", "Evolution: few evaluations", evolution.section("evolve")),
    Section("evolve_language", "Evolution: a small language model", evolution.section("evolve_language")),
    Section("peers", "Other programs", peers.parts),
    Section("merge_speed", "Speed of merging", speed.parts),
    Section("parity", "Parity with mergekit", speed.parity),
    Section("parity_dialect", "Parity with mergekit's dialect", speed.dialect),
    Section("taskvectors", "Speed of task-vector expressions", speed.task_vectors),
    Section("lowrank", "Decompositions", numerics.lowrank),
    Section("alignment", "Speed of alignment", numerics.alignment),
    Section("irt", "Item response theory", numerics.irt),
)


def others(known: Iterable[str]) -> list[Section]:
    """Sections for records that none of the above is made from."""
    named = {section.record for section in SECTIONS}
    titles = {record: record.replace("_", " ").capitalize() for record in sorted(known) if record not in named}
    return [Section(record, title, tables) for record, title in titles.items()]
