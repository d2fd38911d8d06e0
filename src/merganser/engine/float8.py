"""Write a merge in FP8, as compressed-tensors stores it: float8 weights with a float32 scale per row.

vLLM and transformers can read it; activations are quantised dynamically, so that no data is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Rows, TensorSpec
from merganser.checkpoints.sidecars import freeze_edits
from merganser.checkpoints.skeleton import build_skeleton
from merganser.engine.merge import Merge
from merganser.engine.nested import Merged
from merganser.engine.plan import Output, Source
from merganser.engine.requantised import Requantised, replace_by_codes
from merganser.errors import InputError
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_DTYPE, _SCALE = "float8_e4m3fn", "_scale"
_LARGEST = 448.0
#: The weight of one expert, which is a Linear layer if experts are stored one by one.
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Float8(Requantised):
    """The result of a merge with a scale per row of its Linear weights."""

    def names(self) -> Sequence[str]:
        # Scales come last: by then their rows have been written.
        return [*self.source.names(), *(name + _SCALE for name in self.ledger.names())]

    def spec(self, name: str) -> TensorSpec:
        weight = name.removesuffix(_SCALE)
        if weight not in self.ledger:
            return self.source.spec(name)
        shape = self.source.spec(weight).shape
        return TensorSpec(shape, _DTYPE) if weight == name else TensorSpec((shape[0], 1), "float32")

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        weight = name.removesuffix(_SCALE)
        if weight not in self.ledger:
            found = self.source.read(name, rows)
            self.check(name, found)
            return found
        span = rows or (0, self.source.spec(weight).shape[0])
        if weight == name:
            return self.encode_rows(name, span, self.source.read(name, span).to(torch.float32))
        known = self.ledger.scales(weight)
        if known is None:
            known = self.encode(weight, self.source.read(weight).to(torch.float32))[1]
        return known[span[0] : span[1]].unsqueeze(1)

    def overhead(self, name: str, entries: int) -> int:
        weight = name.removesuffix(_SCALE)
        size = self.source.spec(weight).numel if weight != name and weight in self.ledger else entries
        return super().overhead(weight if size != entries else name, size)

    def encode(self, name: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scales = (values.abs().amax(1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (values / scales.unsqueeze(1)).to(torch.float8_e4m3fn)
        return codes, scales, codes.to(torch.float32) * scales.unsqueeze(1)


def quantise_to_float8(merge: Merge) -> Merge:
    """Return a merge whose Linear weights are written in FP8.

    Args:
        merge: What to merge.

    Returns:
        The same merge, quantised as it is written, with the quantisation in its config.

    Raises:
        InputError: If the Linear weights are unknown, or some cannot be quantised.
    """
    chosen, ignored = _choose(merge)
    plan = merge.plan
    view = Float8(Merged(merge, plan.models[0].label), chosen, merge.sources[0])
    outputs = [Output(name, view.spec(name), "passthrough", (Source(0, name),)) for name in view.names()]
    same = {output.name: output.spec for output in plan.outputs if output.name not in chosen}
    outputs = [replace(each, spec=same.get(each.name, each.spec)) for each in outputs]
    edits = [*plan.sidecars.config, (("quantization_config",), _settings(ignored))]
    told = replace(plan.sidecars, config=freeze_edits(edits))
    return replace_by_codes(
        merge, view, outputs, told, f"{len(chosen)} Linear weights are written in FP8, with a scale per row"
    )


def _choose(merge: Merge) -> tuple[dict[str, int], list[str]]:
    """Return the weights to quantise with their rows, and the modules whose matrices stay unquantised."""
    model = build_skeleton(merge.sources[0])
    if model is None:
        raise InputError(
            "output.quantize: fp8 needs a config.json of an architecture that the installed transformers knows, "
            "to tell which weights are Linear"
        )
    kinds = {f"{name}.weight": type(each).__name__ for name, each in model.named_modules()}
    shapes = {output.name: output.spec for output in merge.plan.outputs}
    if fused := [name for name, spec in shapes.items() if len(spec.shape) == 3 and "expert" in name]:
        raise InputError(
            f"output.quantize: fp8 cannot store {fused[0]!r}, experts fused into one tensor; start from a model that "
            "stores its experts one by one"
        )
    matrices = [name for name, spec in shapes.items() if name.endswith(".weight") and len(spec.shape) == 2]
    linear = [name for name in matrices if kinds.get(name) == "Linear" or _EXPERT.search(name)]
    chosen = {name: shapes[name].shape[0] for name in linear if any(part.isdigit() for part in name.split("."))}
    if not chosen:
        raise InputError("output.quantize: fp8: the model has no Linear weights in its layers")
    left = [name for name in matrices if name not in chosen and kinds.get(name) != "Embedding"]
    return chosen, sorted({name.removesuffix(".weight") for name in left} | _heads(kinds, shapes))


def _heads(kinds: dict[str, str], shapes: dict[str, Any]) -> set[str]:
    """Return Linear modules without a weight of their own, such as a tied head."""
    return {name.removesuffix(".weight") for name, kind in kinds.items() if kind == "Linear" and name not in shapes}


def _settings(ignored: Sequence[str]) -> dict[str, Any]:
    usual = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**usual, "strategy": "channel", "dynamic": False}
    inputs = {**usual, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }
