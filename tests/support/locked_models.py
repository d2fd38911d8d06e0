"""Small models with cards, and the digests of their files by other means."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file

LICENCES = {"base": "mit", "math": "apache-2.0", "code": "cc-by-sa-4.0"}


def make_models(directory: Path) -> None:
    for seed, (name, licence) in enumerate(LICENCES.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            "embed.weight": torch.randn(40, 8, generator=generator),
            "layers.0.weight": torch.randn(8, 8, generator=generator).bfloat16(),
            "norm.weight": torch.randn(8, generator=generator),
            "steps": torch.tensor(seed),
        }
        (directory / name).mkdir(parents=True)
        save_file(tensors, directory / name / "model.safetensors", {"format": "pt"})
        (directory / name / "config.json").write_text("{}")
        (directory / name / "README.md").write_text(f"---\nlicense: {licence}\n---\n# {name}\n")


HASHES = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


def digests(file: Path, algorithm: str = "sha256") -> dict[str, str]:
    """The digests of all tensors of a safetensors file, by reading it as its format says."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    return {
        name: HASHES[algorithm](content[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]])
        .hexdigest()
        for name, entry in header.items()
        if name != "__metadata__"
    }  # fmt: skip
