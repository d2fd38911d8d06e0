"""Ask candidates in 8 or 4 bits: a quantised copy of a live module, of which only changed layers are made again.

Merges are computed in full precision. The linear layers of the copy take a quarter or an eighth of float32's memory, so
that a large model fits on a small device. It answers a little differently, which a study measures on its endpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import nn

from merganser.errors import InputError, require

#: Activations beyond this are multiplied in half precision, as LLM.int8() does by default.
OUTLIERS = 6.0


@dataclass(frozen=True)
class Quantization:
    """How linear layers are quantised by bitsandbytes.

    Attributes:
        form: `int8`, whose rows are multiples of max |w| / 127 (LLM.int8()), or `nf4`, whose blocks of 64 weights are
            scaled to [−1, 1] and rounded to the 16 quantiles of a normal distribution (QLoRA).
        device: The device of the quantised layers.
    """

    form: str
    device: str = "cpu"

    def __call__(self, layer: nn.Linear) -> nn.Module:
        """Return a quantised copy of a linear layer."""
        bnb = require("bitsandbytes", "quantize")
        # It warns at every multiplication that inputs of int8 layers are rounded to float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        weight, bias = layer.weight.detach().clone(), layer.bias is not None
        copy: Any
        if self.form == "int8":
            copy = bnb.nn.Linear8bitLt(
                layer.in_features, layer.out_features, bias, has_fp16_weights=False, threshold=OUTLIERS, device="meta"
            )
            copy.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            copy = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias, compute_dtype=weight.dtype, device="meta"
            )
            copy.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type=self.form)
            # On some processors bitsandbytes would use a kernel that refuses many shapes and multiplies in bfloat16.
            copy.support_avx512bf16_for_cpu = False
        if bias:
            copy.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        quantized: nn.Module = copy.to(self.device).eval()
        return quantized


class QuantizedCopy:
    """A copy of a module with quantised linear layers, kept up to date layer by layer.

    The output layer, and layers that a model of transformers keeps in float32, are not quantised.

    Args:
        source: The module in full precision.
        quantization: How its linear layers are quantised.

    Raises:
        InputError: If the module has no linear layer.
    """

    def __init__(self, source: nn.Module, quantization: Quantization) -> None:
        head = getattr(source, "get_output_embeddings", lambda: None)()
        kept = tuple(getattr(source, "_keep_in_fp32_modules", None) or ())
        self._layers = {
            name: layer
            for name, layer in source.named_modules()
            if type(layer) is nn.Linear and layer is not head and not set(kept) & set(name.split("."))
        }
        if not self._layers:
            raise InputError(f"{type(source).__name__}: it has no linear layers to quantize; leave out model.quantize")
        self._quantization = quantization
        self._stale: set[str] = set()
        # What `deepcopy` finds in its memo it does not copy, so that large matrices are never there twice.
        memo = {id(layer): quantization(layer) for layer in self._layers.values()}
        self._module: nn.Module = deepcopy(source, memo).to(quantization.device)
        own = self._module.state_dict()
        self._plain = {
            name: (own[name], tensor)
            for name, tensor in source.state_dict().items()
            if name.rpartition(".")[0] not in self._layers
        }

    def mark(self, names: Iterable[str]) -> None:
        """Mark tensors of the source, by their names in its state dict, as changed."""
        self._stale.update(names)

    def refresh(self) -> nn.Module:
        """Quantise and copy what was marked, and return the copy."""
        for layer in {name.rpartition(".")[0] for name in self._stale} & self._layers.keys():
            self._module.set_submodule(layer, self._quantization(self._layers[layer]))
        for name in self._stale & self._plain.keys():
            mine, theirs = self._plain[name]
            mine.copy_(theirs)
        self._stale.clear()
        return self._module
