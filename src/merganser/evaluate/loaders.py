"""Build the module that weights are merged into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from merganser.errors import InputError, did_you_mean, require
from merganser.evaluate.references import import_function

LOADERS = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "encoder": "AutoModel",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "token-classification": "AutoModelForTokenClassification",
}


@dataclass(frozen=True)
class Loader:
    """Builds the module that candidates are merged into: a `transformers` architecture from `path`, or a function.

    With `dtype` the module computes in it, whatever the dtype of the checkpoints.
    """

    kind: str
    path: str
    device: str = "cpu"
    dtype: str | None = None

    def __call__(self) -> nn.Module:
        if ":" in self.kind:
            module: nn.Module = import_function(self.kind)()
            return module.to(self.device, None if self.dtype is None else getattr(torch, self.dtype))
        transformers = require("transformers", "hf")
        if self.kind not in LOADERS:
            raise InputError(
                f"unknown kind of model {self.kind!r}{did_you_mean(self.kind, LOADERS)}; or package.module:function"
            )
        with hidden_progress(transformers):
            load = getattr(transformers, LOADERS[self.kind]).from_pretrained
            found: nn.Module = load(self.path, dtype=self.dtype or "auto")
        return found.to(self.device)


@contextmanager
def hidden_progress(transformers: Any) -> Iterator[None]:
    """Hide the progress bars of `transformers` while it loads weights; commands show their own. Restored on exit."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
