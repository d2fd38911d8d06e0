"""Builds the module that weights are merged into."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from merganser.errors import InputError, did_you_mean, require
from merganser.evaluate.references import imported

LOADERS = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
}


@dataclass(frozen=True)
class Loader:
    """Builds the module that candidates are merged into: a `transformers` architecture from `path`, or a function."""

    kind: str
    path: str
    device: str = "cpu"

    def __call__(self) -> nn.Module:
        if ":" in self.kind:
            module: nn.Module = imported(self.kind)()
            return module.to(self.device)
        transformers = require("transformers", "hf")
        if self.kind not in LOADERS:
            raise InputError(
                f"unknown kind of model {self.kind!r}{did_you_mean(self.kind, LOADERS)}; or package.module:function"
            )
        found: nn.Module = getattr(transformers, LOADERS[self.kind]).from_pretrained(self.path, dtype="auto")
        return found.to(self.device)
