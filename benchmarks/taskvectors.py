"""What an expression over four checkpoints costs: as a recipe, as Python, and the limit, in one run.

    python -m benchmarks.taskvectors [--params 1.1B] [--json FILE]

`base + 0.4*(a + b) - c` on Llama-shaped bfloat16 checkpoints. The limit is a compiled program that does the same
reading, arithmetic and writing (`benchmarks/limits`); inputs are in the page cache, and all sides are charged for
syncing what they wrote. `geometry` is the norm of that expression and its cosine with a, against reading the four
inputs. Ratios are without the start-up of Python and torch; memory is the peak of anonymous pages, sampled. Needs 12 GB
of disk at the default size.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict

from benchmarks.limits import compile_limit
from benchmarks.machine import describe
from benchmarks.measuring import Run, measure, median
from benchmarks.merge_speed import begin, limit, startup, warm
from benchmarks.records import record

PYTHON = """
import sys
import merganser as mg
out, base, *models = sys.argv[1:]
a, b, c = (mg.TaskVector(model, base) for model in models)
mg.save((0.4 * (a + b) - c).apply_to(base), out)
"""
GEOMETRY = """
import sys
import merganser as mg
_, base, *models = sys.argv[1:]
a, b, c = (mg.TaskVector(model, base) for model in models)
made = 0.4 * (a + b) - c
made.cosine(a)
"""
READ = """
import sys
buffer = bytearray(1 << 23)
for path in sys.argv[2:]:
    with open(path + "/model.safetensors", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options, paths = begin(parser)
    out = options.workdir / "out"
    recipe = options.workdir / "expression.json"
    models = dict(zip(("base", "a", "b", "c"), map(str, paths), strict=True))
    recipe.write_text(json.dumps({"expression": "base + 0.4*(a + b) - c", "models": models}))
    start = startup(options.workdir, with_torch=True).seconds
    program = compile_limit(options.workdir)
    listed = [str(out), *map(str, paths)]
    sides = {
        "recipe": [sys.executable, "-m", "merganser", "merge", str(recipe), str(out)],
        "python": [sys.executable, "-c", PYTHON, *listed],
        "geometry": [sys.executable, "-c", GEOMETRY, *listed],
    }
    warm(paths)
    runs: dict[str, list[Run]] = {name: [] for name in (*sides, *(["limit"] if program else []), "read")}
    for _ in range(options.repeat):
        if program is not None:
            runs["limit"].append(limit(program, "task_arithmetic", paths, out))
        runs["read"].append(measure([sys.executable, "-c", READ, *listed], out))
        for name, command in sides.items():
            runs[name].append(measure(command, out))
    shutil.rmtree(out, ignore_errors=True)
    found = {name: median(each) for name, each in runs.items()}
    print(f"{describe()}\nstart-up of Python, torch and merganser: {start:.2f} s; {options.params} parameters")
    print(f"{'':<10}{'s':>8}{'CPU s':>8}{'anon MiB':>10}{'ratio to limit':>16}")
    results = {}
    for name, run in found.items():
        against = found.get("read" if name in ("geometry", "read") else "limit")
        ratio = (run.seconds - (start if name in sides else 0)) / against.seconds if against else math.nan
        results[name] = {**asdict(run), "ratio_to_limit": ratio}
        memory = run.peak_anonymous / 2**20
        print(f"{name:<10}{run.seconds:>8.2f}{run.cpu_seconds:>8.1f}{memory:>10.0f}{ratio:>16.2f}")
    record(options.json, {"params": options.params, "start_up": start, "sides": results}, [0])


if __name__ == "__main__":
    main()
