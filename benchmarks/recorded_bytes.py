"""Does a change of the code change the bytes of a merge?

    python -m benchmarks.recorded_bytes --record before.json      # before the change
    python -m benchmarks.recorded_bytes --compare before.json     # after it, on the same machine

Merges small checkpoints with every method, in float32 and bfloat16, and with every recipe of `benchmarks.parity`, and
compares the sha256 of the weights. Methods without a decomposition give the same bytes on every machine, so a test
keeps a recording of those. Takes about ten seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import merganser as mg
from benchmarks import parity
from merganser.methods.adarank import components
from merganser.methods.registry import parameters, registry

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (600, 96),
    "layers.0.attention.weight": (96, 96),
    "layers.0.mlp.weight": (2200, 260),  # several blocks
    "layers.0.mlp.bias": (2200,),
    "layers.1.attention.weight": (96, 96),
    "layers.1.conv.weight": (24, 12, 3, 3),
    "layers.1.scale": (),
    "norm.weight": (96,),
}
DTYPES = (torch.float32, torch.bfloat16)
#: Methods without a decomposition whose exponentials are rounded as the vectors of the processor do it.
EXPONENTIALS = ("pcb",)


def make_models(directory: Path, dtype: torch.dtype) -> list[Path]:
    """Write a base, three fine-tunes of it and their statistics; the numbers are the same on every machine."""
    numbers = np.random.Generator(np.random.PCG64(0))
    base = {name: numbers.uniform(-0.1, 0.1, shape) for name, shape in SHAPES.items()}
    paths = []
    for label in ("base", "a", "b", "c"):
        drift = 0.0 if label == "base" else 0.02
        tensors = {k: torch.tensor(v + drift * numbers.uniform(-1, 1, v.shape)).to(dtype) for k, v in base.items()}
        tensors["steps"] = torch.tensor([len(paths)])
        paths.append(directory / label)
        paths[-1].mkdir(parents=True)
        save_file(tensors, paths[-1] / "model.safetensors", {"format": "pt"})
        fisher = {name: torch.tensor(numbers.uniform(0, 1, shape)).float() for name, shape in SHAPES.items()}
        save_file(fisher, directory / f"{label}.fisher.safetensors")
        grams = {}
        for name in ("layers.0.attention.weight", "layers.1.attention.weight"):
            inputs = numbers.uniform(-1, 1, (200, SHAPES[name][1]))
            grams[name] = torch.tensor(inputs.T @ inputs / 200).float()
        save_file(grams, directory / f"{label}.gram.safetensors")
        chosen = {name: 0.3 * (torch.arange(components(shape)) % 2) for name, shape in SHAPES.items()}
        save_file(chosen, directory / f"{label}.components.safetensors")
    return paths


def write_recipe(method: str, paths: list[Path]) -> Path:
    """Write the recipe of a method with its default parameters over as many of the models as it takes.

    Models are named relative to the recipe: random drops are drawn from a model's name.
    """
    rule = registry()[method]
    count = int(min(rule.models[1], 3 if rule.base == "required" else 4))
    names = [path.name for path in paths]
    models = [
        {"path": name, **{kind: f"{name}.{kind}.safetensors" for kind in rule.statistics}} for name in names[-count:]
    ]
    required = {name: 0.3 for name, parameter in parameters(rule).items() if parameter.required}
    document: dict[str, Any] = {"method": method, "models": models, "parameters": required, "seed": 7}
    if rule.base == "required":
        document["base"] = names[0]
    recipe = paths[0].parent / f"{method}.yml"
    recipe.write_text(json.dumps(document))
    return recipe


def digest(checkpoint: Path) -> str:
    """Return the sha256 of every tensor of a checkpoint by name, dtype, shape and bytes."""
    opened = mg.open(checkpoint)
    found = hashlib.sha256()
    for name in sorted(opened.names()):
        found.update(f"{name} {opened.spec(name)}\n".encode())
        found.update(opened.read(name).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def measure(decompositions: bool = True) -> dict[str, str]:
    """Merge with every method and every recipe of the parity table; return the digests of the results."""
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for dtype in DTYPES:
            title = str(dtype).removeprefix("torch.")
            paths = make_models(directory / title, dtype)
            for method, rule in registry().items():
                if decompositions or (rule.reach != "whole" and method not in EXPONENTIALS):
                    out = mg.run(write_recipe(method, paths), directory / f"{title}-{method}")
                    found[f"{method}, {title}"] = digest(out)
        if decompositions:
            (directory / "parity").mkdir()
            paths = parity.make_models(directory / "parity")
            for number, case in enumerate(parity.CASES):
                out = mg.run(parity.document(case, paths), directory / f"parity-{number}")
                found[f"mergekit recipe: {case}"] = digest(out)
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of the merges whose bytes differ, or that only one side has."""
    return [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="write the digests to this file")
    parser.add_argument("--compare", type=Path, help="compare with the digests of this file; exit 1 if any differ")
    parser.add_argument("--portable", action="store_true", help="leave out decompositions and the parity recipes")
    options = parser.parse_args()
    found = measure(decompositions=not options.portable)
    if options.record is not None:
        options.record.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} merges recorded in {options.record}")
    if options.compare is not None:
        changed = differences(json.loads(options.compare.read_text()), found)
        print(f"{len(found)} merges, {len(changed)} with other bytes than recorded")
        for name in changed:
            print(f"  {name}")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
