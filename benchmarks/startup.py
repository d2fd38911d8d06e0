"""What a command costs before it has done anything: processor seconds of the commands that read no weights.

    python -m benchmarks.startup [--times 5] [--mergekit BIN] [--json FILE]

Each command runs on models of a few kilobytes, in a process of its own, in turns; the median counts. Ratios are to a
bare interpreter and to one that imports torch, measured in the same run. Bytecode is cached as by an installer
whatever the environment says. BIN is the bin directory of an environment with mergekit. Takes a minute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.records import record

RECIPE = "method: ties\nbase: base\nmodels: [math, {path: code, weight: 0.5}]\nparameters: {density: 0.4}\n"
MERGEKIT_RECIPE = (
    "merge_method: ties\nbase_model: base\ndtype: bfloat16\n"
    "models: [{model: math, parameters: {weight: 0.5, density: 0.4}}, {model: code, parameters: {weight: 0.5}}]\n"
)
#: What is measured, and the exit code.
COMMANDS: Mapping[tuple[str, ...], int] = {
    ("--version",): 0,
    ("--help",): 0,
    ("plan", "--help"): 0,
    ("methods",): 0,
    ("methods", "ties"): 0,
    ("schema", "recipe"): 0,
    ("plan", "recipe.yml"): 0,
    ("plan", "recipe.yml", "--tensors"): 0,
    ("plan", "mergekit.yml"): 0,
    ("plan", "mergekit.yml", "--native"): 0,
    ("merge", "recipe.yml", "out", "--dry-run"): 0,
    ("merge", "typo.yml", "out"): 2,
    ("inspect", "base"): 0,
    ("verify", "output"): 0,
    ("lineage", "output"): 0,
    ("library", "list", "library"): 0,
}


def prepare(directory: Path) -> None:
    """Write the models, recipes and the library that the commands are about."""
    import torch
    from safetensors.torch import save_file

    import merganser as mg

    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{i}.mlp.weight": torch.randn(16, 16, generator=generator) for i in range(4)}
    for name in ("base", "math", "code"):
        (directory / name).mkdir(parents=True)
        moved = {key: value + 0.1 * torch.randn(16, 16, generator=generator) for key, value in base.items()}
        save_file(base if name == "base" else moved, directory / name / "model.safetensors")
        (directory / name / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 4}')
    (directory / "recipe.yml").write_text(RECIPE)
    (directory / "mergekit.yml").write_text(MERGEKIT_RECIPE)
    (directory / "typo.yml").write_text(RECIPE.replace("density", "densty"))
    experts = {name: directory / name for name in ("math", "code")}
    mg.run(directory / "recipe.yml", directory / "output")
    mg.library.Library.build(directory / "base", experts, directory / "library")


def processor_seconds(command: Sequence[str], directory: Path, exit_code: int = 0) -> float:
    """Run a command and return the processor time it took; raises if it ends with another exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(directory / "bytecode")
    before = os.times()
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment)
    after = os.times()
    if done.returncode != exit_code:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(directory: Path, times: int, mergekit: Path | None) -> dict[str, float]:
    """Return the median processor seconds of every command, taken in turns."""
    merganser = [sys.executable, "-m", "merganser"]
    cases = {
        "python -c pass": ([sys.executable, "-c", "pass"], 0),
        "python -c 'import torch'": ([sys.executable, "-c", "import torch"], 0),
        **{f"merganser {' '.join(words)}": ([*merganser, *words], code) for words, code in COMMANDS.items()},
    }
    if mergekit is not None:
        cases["mergekit-yaml --help"] = ([str(mergekit / "mergekit-yaml"), "--help"], 0)
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(times + 1):
        for name, (command, code) in cases.items():
            seconds = processor_seconds(command, directory, code)
            if turn:  # the first one writes bytecode and fills the page cache
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="how often each command is measured")
    parser.add_argument("--mergekit", type=Path, help="bin directory of an environment with mergekit")
    parser.add_argument("--json", type=Path, help="store the results in this file")
    options = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        seconds = measure(Path(place), options.times, options.mergekit)
    bare, torch_alone = seconds["python -c pass"], seconds["python -c 'import torch'"]
    print(f"{'command':<44} {'processor':>9} {'× bare':>7} {'× torch':>7}")
    for name, taken in seconds.items():
        print(f"{name:<44} {taken:8.2f}s {taken / bare:7.1f} {taken / torch_alone:7.2f}")
    record(options.json, {"seconds": seconds}, seeds=())


if __name__ == "__main__":
    main()
