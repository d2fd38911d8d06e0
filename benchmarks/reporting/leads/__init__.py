"""What every section means for a user, in a sentence or two before its tables.

Sentences are made from stored results, so that they change with what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.reporting.leads import experts, networks, programs, searches

#: By record.
LEADS: Mapping[str, Callable[[Any], str]] = {
    "single_task_mlp": partial(networks.matched, "MLPs"),
    "single_task_mlp-fashion": partial(networks.matched, "MLPs"),
    "single_task_cnn-fashion": partial(networks.matched, "small CNNs"),
    "single_task_resnet20-bn": partial(networks.matched, "ResNet20"),
    "single_task_resnet20-bn-2x": partial(networks.matched, "wide ResNet20"),
    "single_task_resnet20-ln": partial(networks.matched, "ResNet20"),
    "single_task_vgg11-bn": partial(networks.matched, "VGG11"),
    "single_task_vit": partial(networks.matched, "patch transformers"),
    "alignment_transformers": networks.transformers,
    "single_task_extras": networks.extras,
    "single_task_extras_resnet20-bn": networks.extras,
    "single_task_extras_resnet20-bn-2x": networks.sampled,
    "single_task_extras_cnn-fashion": networks.sampled,
    "alignment": networks.alignment_speed,
    "multi_task": experts.experts,
    "multi_task_images": experts.experts,
    "compression": experts.compression,
    "compression_20": experts.compression,
    "adaptive": experts.adaptive,
    "mergeability": experts.mergeability,
    "auto": experts.autopilot,
    "auto_images": experts.autopilot,
    "auto_language": experts.autopilot,
    "auto_simulations": experts.simulated,
    "theory": experts.theory,
    "atm": experts.alternating,
    "forgetting": experts.forgetting,
    "evolve_costs": searches.costs,
    "evolve_memory": searches.memory,
    "evolve_skills": searches.skills,
    "evolve_racing": searches.racing,
    "evolve": searches.few_items,
    "evolve_language": searches.few_items,
    "irt": searches.item_response,
    "zip": networks.zipped,
    "transplant": networks.transplanted,
    "moe": networks.mixtures,
    "transport": networks.transported,
    "merge_speed": programs.merge_speed,
    "taskvectors": programs.expressions,
    "lowrank": programs.decompositions,
    "peers": programs.peers,
    "parity": programs.parity,
    "parity_dialect": programs.dialect,
}
