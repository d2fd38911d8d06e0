"""Symmetries of tiny models of transformers and timm, self-tested and compared with the freedom on record.

`architecture_symmetries.json` has for each architecture the number of free axes and the units that move: how many
groups of which size, nested ones as "heads × units". A smaller freedom than on record is a loss, and fails; so does a
larger one, until it is looked at and put on record. The suite takes every twelfth architecture;
`MERGANSER_ARCHITECTURES=all` takes all.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from merganser.align import Symmetry, symmetry
from merganser.errors import InputError
from support.architectures import ARCHITECTURES, part_of
from support.tiny_models import tiny_inputs, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

RECORDED: dict[str, str] = json.loads(Path(__file__).with_name("architecture_symmetries.json").read_text())
PATCHES = {"img_size": 32, "patch_size": 8, "embed_dim": 24}
#: A model of timm -> what makes it small.
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "legacy_seresnet18": {},
    "regnetx_002": {},
    "mobilenetv2_035": {},
    "mobilenetv3_small_050": {},
    "tinynet_e": {},
    "ghostnet_050": {},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {**PATCHES, "depth": 2, "num_heads": 2},
    "deit_tiny_distilled_patch16_224": {**PATCHES, "depth": 2, "num_heads": 2},
    "cait_xxs24_224": {**PATCHES, "depth": 2, "num_heads": 2},
    "beit_base_patch16_224": {**PATCHES, "depth": 2, "num_heads": 2},
    "pit_ti_224": {"img_size": 64},
}

#: Models that torch.export cannot trace, and where.
REFUSED = {
    **dict.fromkeys(("LongformerForMaskedLM", "LEDForConditionalGeneration"), "if is_global_attn"),
    "SwitchTransformersForConditionalGeneration": "add attention_mask",  # and then casts a module as it runs
}


def freedom(found: Symmetry) -> str:
    """Return the free axes, and the units that move: "43 axes: 16 centred, 3 of 2, 3 of 2 × 8 orthogonal"."""
    units: Counter[str] = Counter()
    for name, atom in found.atoms.items():
        sizes = [found.atoms[each].size for each in (*found.ancestors(name), name)]
        group = "" if atom.group == "permutation" else f" {atom.group}"
        units[" × ".join(map(str, sizes)) + group] += 1
    axes = len({place for places in found.occurrences.values() for place in places})
    return f"{axes} axes: " + ", ".join(f"{count} of {size}" if count > 1 else size for size, count in units.items())


def derive(network: Any, inputs: Any) -> Symmetry:
    """Return the symmetry of the logits, if there are any: other outputs would hold the units they show."""
    if type(network).__name__ == "LongT5ForConditionalGeneration":
        mask = torch.ones_like(inputs["input_ids"])
        inputs |= {"attention_mask": mask, "decoder_attention_mask": mask}
    with torch.no_grad():
        outputs = network(**inputs) if isinstance(inputs, dict) else None
    logits = "logits" if outputs is not None and "logits" in outputs else None
    return symmetry(network, inputs, kind="orthogonal", outputs=logits, allow_unused=True)


@pytest.mark.parametrize("name", part_of(ARCHITECTURES, 12))
def test_transformers(name: str, transformers: ModuleType) -> None:
    if (cls := getattr(transformers, name, None)) is None:
        pytest.skip(f"this version of transformers has no {name}")
    network = tiny_model(cls, ARCHITECTURES[name], 0)
    if name in REFUSED:
        with pytest.raises(InputError, match=f"cannot trace .*{REFUSED[name]}"):
            derive(network, tiny_inputs(network))
        return
    assert freedom(derive(network, tiny_inputs(network))) == RECORDED[name]


@pytest.mark.parametrize("name", part_of(TIMM, 12))
def test_timm(name: str, timm: ModuleType) -> None:
    network = timm.create_model(name, num_classes=4, **TIMM[name]).eval()
    size = TIMM[name].get("img_size", 32)
    assert freedom(derive(network, torch.randn(1, 3, size, size))) == RECORDED[f"timm {name}"]


def test_every_record_has_an_architecture() -> None:
    assert set(RECORDED) == {*ARCHITECTURES, *(f"timm {name}" for name in TIMM)} - set(REFUSED)
