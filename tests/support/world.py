"""What the examples of docstrings find at hand: the names and files a reader would imagine around them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import merganser as mg

RECIPE = """\
method: ties
base: base
models: [math, code]
parameters: {density: 0.5}
"""


def network(seed: int = 0) -> nn.Module:
    """Return a small classifier: 8 inputs, 4 classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def world(directory: Path, text: str = "library") -> dict[str, Any]:
    """Write `base`, `math`, `code` and `recipe.yml` into a directory; return the names that examples may use.

    The library is built if the text that uses the names speaks of one.
    """
    torch.manual_seed(0)
    base = network()
    experts = {"math": copy.deepcopy(base), "code": copy.deepcopy(base)}
    with torch.no_grad():
        for expert in experts.values():
            for parameter in expert.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    for name, module in {"base": base, **experts}.items():
        (directory / name).mkdir()
        save_file(module.state_dict(), directory / name / "model.safetensors", {"format": "pt"})
    (directory / "recipe.yml").write_text(RECIPE)
    images, labels = torch.randn(12, 8), torch.randint(4, (12,))
    encoder = nn.Sequential(*base[:4])
    tasks = {name: nn.Sequential(*expert[:4]) for name, expert in experts.items()}
    return {
        "mg": mg,
        "torch": torch,
        "nn": nn,
        "base": base,
        "math": experts["math"],
        "code": experts["code"],
        "experts": experts,
        "models": [network(seed) for seed in range(3)],
        "images": images,
        "labels": labels,
        "batches": [(images[:6], labels[:6]), (images[6:], labels[6:])],
        "encoder": encoder,
        "heads": {name: nn.Linear(16, 4) for name in tasks},
        **({"library": mg.library.Library.build(encoder, tasks, directory / "library")} if "library" in text else {}),
    }
