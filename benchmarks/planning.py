"""What planning a large merge costs: processor seconds, memory and opened files of `merganser plan`, headers alone.

    python -m benchmarks.planning [--cases 70B moe …] [--json FILE]

Writes a base and two models of the shapes as sharded checkpoints whose files end after the header (the rest is a hole
that takes no disk), and plans a TIES merge of them in a process of its own. Goals for 70B: ≤ 2 s and ≤ 300 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.records import record
from merganser.scaling.llamas import SIZES, llama_shapes

Shapes = Mapping[str, tuple[int, ...]]
#: Llamas, and a mixture of 26 layers with 128 experts each: 10,000 tensors.
CASES: Mapping[str, tuple[int, ...]] = {**SIZES, "moe": (26, 2048, 1408, 2048, 102400, 128)}
SHARD = 5_000_000_000
#: Plans a recipe and prints what that took, as JSON. Opened files are those in its directory.
PROGRAM = """
import json, os, resource, sys, time
opened = []
where = os.path.realpath(sys.argv[2])
def audit(event, arguments):
    if event == "open" and str(arguments[0]).startswith(where):
        opened.append(str(arguments[0]))
sys.addaudithook(audit)
from merganser import recipes
from merganser.checkpoints.opening import open_headers
before = time.process_time()
merge = recipes.prepare(recipes.load(sys.argv[1]), open_headers)
from merganser.report.plans import summarise
summary = summarise(merge, 2**62, 2)
usage = resource.getrusage(resource.RUSAGE_SELF)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({
    "tensors": summary["tensors"], "bytes_in": summary["bytes_in"],
    "planning_seconds": time.process_time() - before, "seconds": usage.ru_utime + usage.ru_stime,
    "peak_bytes": peak * 1024, "opens": len(opened), "torch": "torch" in sys.modules,
}))
"""


def write_headers(directory: Path, shapes: Shapes, shard: int = SHARD) -> Path:
    """Write a sharded bfloat16 checkpoint of these shapes whose files have headers and no data."""
    directory.mkdir(parents=True)
    shards: list[dict[str, Any]] = [{}]
    place = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if place and place + size > shard:
            shards.append({})
            place = 0
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, entries in zip(names, shards, strict=True):
        header = json.dumps(entries).encode()
        with (directory / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            stream.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in entries.values()))
    index = {name: file for file, entries in zip(names, shards, strict=True) for name in entries}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def measure_planning(directory: Path, shapes: Shapes, shard: int = SHARD, method: str = "ties") -> dict[str, Any]:
    """Return what planning a merge of two models and a base of these shapes takes, in a process of its own."""
    base, *models = (str(write_headers(directory / name, shapes, shard)) for name in ("base", "math", "code"))
    recipe = directory / "recipe.json"
    recipe.write_text(json.dumps({"method": method, "base": base, "models": models}))
    command = [sys.executable, "-c", PROGRAM, str(recipe), str(directory)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"files": sum(1 for _ in directory.glob("*/*"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path, help="store the figures")
    options = parser.parse_args()
    print(describe())
    results = {}
    for case in options.cases:
        with tempfile.TemporaryDirectory() as place:
            found = results[case] = measure_planning(Path(place), llama_shapes(*CASES[case]))
        print(
            f"{case:<5} {found['tensors']:>6} tensors, {found['bytes_in'] / 1e9:.0f} GB of input: planned in "
            f"{found['planning_seconds']:.2f} s of processor ({found['seconds']:.2f} s with start-up), "
            f"{found['peak_bytes'] / 1e6:.0f} MB, {found['opens']} files opened of {found['files']}",
            flush=True,
        )
    record(options.json, results, seeds=())


if __name__ == "__main__":
    main()
