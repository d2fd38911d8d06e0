"""The layers of a MiniLM encoder that fine-tuning trains, apart from the frozen ones below them.

All experts share the embeddings and the first `FROZEN` layers with the base. What these make of a sentence is computed
once, and training, merging and scoring run the rest of the encoder only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache as memoise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.zoo.text_tasks import Sentences, load_encoder
from merganser.errors import InputError, require

#: Layers that are not trained, of six.
FROZEN = 3


class TopLayers(nn.Module):
    """The trained layers, under the names that they have in the encoder."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Module()
        layers = encoder.get_submodule("encoder.layer").named_children()
        self.encoder.layer = nn.ModuleDict({name: layer for name, layer in layers if int(name) >= FROZEN})

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Any:
        """Run the layers on hidden states B×L×384; the result has a `last_hidden_state` as an encoder's has."""
        mask = attention_mask[:, None, None, :].bool()
        for layer in self.encoder.get_submodule("layer").children():
            hidden = layer(hidden, mask)
        return require("transformers.modeling_outputs", "hf").BaseModelOutput(last_hidden_state=hidden)


def load_top_layers() -> nn.Module:
    """Return the base's trained layers in evaluation mode."""
    return TopLayers(load_encoder()).eval()


@memoise
def _frozen() -> nn.Module:
    encoder = load_encoder()
    layers = encoder.get_submodule("encoder.layer")
    assert isinstance(layers, nn.ModuleList)
    encoder.get_submodule("encoder").layer = layers[:FROZEN]
    return encoder


@torch.no_grad()
def with_states(sentences: Sentences, batch: int = 64) -> Sentences:
    """Return the sentences with the hidden states of every token behind the frozen layers."""
    starts = sentences.ends - sentences.lengths
    states = torch.empty(len(sentences.tokens), 384)
    for chosen in sentences.batches(batch):
        inputs = sentences.padded(chosen)
        hidden = _frozen()(**inputs).last_hidden_state
        mask = inputs["attention_mask"].bool()
        places = np.concatenate([np.arange(starts[i], sentences.ends[i]) for i in chosen])
        states[torch.from_numpy(places)] = hidden[mask]
    return replace(sentences, states=states)


@memoise
def _shell() -> tuple[nn.Module, Mapping[str, Tensor]]:
    return load_top_layers(), load_encoder().state_dict()


def layers_from(weights: Mapping[str, Tensor]) -> nn.Module:
    """Load the trained layers of an encoder's weights into one shared module: copy it if two are needed at once.

    Raises:
        InputError: A frozen tensor differs from the base's, so that stored hidden states do not hold.
    """
    layers, base = _shell()
    own = layers.state_dict()
    for name, tensor in base.items():
        # Programs that average what is equal may round it.
        if name not in own and name in weights and not torch.allclose(weights[name], tensor, rtol=1e-5, atol=1e-6):
            raise InputError(f"{name!r} differs from the base's, but the layers up to it are frozen in these experts")
    layers.load_state_dict({name: weights[name] for name in own})
    return layers
