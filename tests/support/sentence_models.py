"""Small models of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def sentence_model(path: Path, value: float, pickled: bool = False) -> Path:
    """As sentence-transformers saves a transformer, a pooling and a dense layer."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (folder, kind) in enumerate(kinds.items())
    ]
    for folder in ("1_Pooling", "2_Dense"):
        (path / folder).mkdir(parents=True)
        (path / folder / "config.json").write_text(json.dumps({"in_features": 4}))
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "config.json").write_text('{"model_type": "bert"}')
    save_file({"encoder.weight": torch.full((3, 4), value)}, path / "model.safetensors", {"format": "pt"})
    dense = {"linear.weight": torch.full((2, 4), 10 * value), "linear.bias": torch.full((2,), -value)}
    if pickled:
        torch.save(dense, path / "2_Dense" / "pytorch_model.bin")
    else:
        save_file(dense, path / "2_Dense" / "model.safetensors")
    return path
