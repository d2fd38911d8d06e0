"""How fast a merge is: ours, mergekit's (in its own environment) and the limit, in one run.

    python -m benchmarks.merge_speed [--params 1.1B] [--mergekit BIN] [--json FILE]

Makes Llama-shaped bfloat16 checkpoints (a base and three models) and merges them. The limit is that of a program with
one thread and a buffer: read every input, then copy one of them. All sides find the inputs in the page cache, and all
are charged for syncing what they wrote. Memory is the peak of anonymous pages, sampled, of a program and its workers
together (pages they share count once). `ratio` columns compare with the same run's limit (ours without start-up) and
mergekit. Takes about 30 minutes with mergekit at the default size, 5 without; needs 12 GB of disk for `--params 1.1B`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.records import record

HIDDEN, INTERMEDIATE, VOCABULARY, KV = 2048, 5632, 32000, 256
METHODS: dict[str, dict[str, object]] = {
    "linear": {"weight": 1.0},
    "task_arithmetic": {"weight": 0.4},
    "slerp": {"t": 0.4},
    "ties": {"weight": 0.4, "density": 0.2},
    "dare_ties": {"weight": 0.4, "density": 0.5},
    "della": {"weight": 0.4, "density": 0.5, "epsilon": 0.2},
    "model_stock": {},
}


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_seconds: float
    peak_anonymous: int


def shapes(parameters: float) -> dict[str, tuple[int, ...]]:
    """A Llama of about this many parameters: fixed width, as many layers as it takes."""
    layer = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KV, HIDDEN),
        "self_attn.v_proj.weight": (KV, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    each = sum(torch.Size(s).numel() for s in layer.values())
    layers = max(1, round((parameters - 2 * VOCABULARY * HIDDEN) / each))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for number in range(layers):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_checkpoints(directory: Path, parameters: float) -> list[Path]:
    """A base and three models with deltas of 1 %, deterministic; made once."""
    from safetensors.torch import save_file

    wanted = shapes(parameters)
    layers = sum(name.endswith("input_layernorm.weight") for name in wanted)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": VOCABULARY, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "hidden_act": "silu",
    }  # fmt: skip
    paths = [directory / f"{parameters / 1e6:.0f}M-{label}" for label in ("base", "a", "b", "c")]
    for number, path in enumerate(paths):
        if (path / "config.json").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for index, (name, shape) in enumerate(wanted.items()):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 0.02
            if number:
                generator = torch.Generator().manual_seed(10_000 * number + index)
                tensor += torch.randn(shape, generator=generator) * 2e-4
            tensors[name] = tensor.bfloat16()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
    return paths


def recipe(method: str, paths: list[Path]) -> dict[str, object]:
    """The same mergekit recipe for both programs."""
    base, *models = (str(path.absolute()) for path in paths)
    if method == "slerp":
        models = [base, models[0]]
    values = METHODS[method]
    per_model = {k: v for k, v in values.items() if k in ("weight", "density", "epsilon")}
    document: dict[str, object] = {
        "merge_method": method,
        "models": [{"model": model, "parameters": per_model} for model in models],
        "parameters": {k: v for k, v in values.items() if k not in per_model},
        "dtype": "bfloat16",
    }
    if method != "linear":
        document["base_model"] = base
    return document


def warm(paths: list[Path]) -> None:
    for path in paths:
        with (path / "model.safetensors").open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def measure(command: list[str], out: Path, environment: dict[str, str] | None = None) -> Run:
    """Run a program that writes `out`, sync what it wrote, and watch its anonymous memory."""
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=os.environ | (environment or {}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        pause = 0.02
        while not over.wait(pause):
            workers = children(process.pid)
            peak = max(peak, shared(process.pid, *workers) if workers else anonymous(process.pid))
            pause = 2.0 if workers else 0.02  # sorting out shared pages costs the programs time

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    over.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    for file in out.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    return Run(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, peak)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def anonymous(pid: int) -> int:
    """Bytes of anonymous pages of one process."""
    return field(Path(f"/proc/{pid}/status"), "RssAnon:")


def shared(*pids: int) -> int:
    """Bytes of anonymous pages of processes that share some of them."""
    return sum(field(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon:") for pid in pids)


def field(path: Path, name: str) -> int:
    """A size in one of the kernel's tables, in bytes; 0 for a process that is gone."""
    try:
        return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(name))
    except (OSError, StopIteration):
        return 0


COPY = """
import os, sys
out, *inputs = sys.argv[1:]
os.makedirs(out)
buffer = bytearray(1 << 23)
for path in inputs:
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
with open(inputs[0], "rb", buffering=0) as source, open(out + "/model.safetensors", "wb", buffering=0) as target:
    while n := source.readinto(buffer):
        target.write(memoryview(buffer)[:n])
"""


def limit(paths: list[Path], out: Path) -> Run:
    """Read every input, then copy one, in one thread."""
    files = [str(path / "model.safetensors") for path in paths]
    return measure([sys.executable, "-c", COPY, str(out), *files], out)


def startup() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch, merganser.recipes.running"], check=True)
    return time.perf_counter() - began


def small_tensors(directory: Path, count: int = 10_000) -> Run:
    """Many tiny tensors: what planning, scheduling and writing cost apart from bytes."""
    from safetensors.torch import save_file

    paths = []
    for label in ("base", "a", "b"):
        paths.append(directory / f"small-{label}")
        paths[-1].mkdir(exist_ok=True)
        tensors = {f"layers.{i}.w": torch.randn(8, 8) for i in range(count)}
        save_file(tensors, paths[-1] / "model.safetensors", {"format": "pt"})
        (paths[-1] / "config.json").write_text("{}")
    config = directory / "small.json"
    config.write_text(json.dumps({"method": "ties", "base": str(paths[0]), "models": [str(p) for p in paths[1:]]}))
    out = directory / "out"
    return measure([sys.executable, "-m", "merganser", "merge", str(config), str(out)], out)


def help_cpu() -> float:
    """CPU seconds of `merganser --help`."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "merganser", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def median(runs: list[Run]) -> Run:
    return Run(
        statistics.median(r.seconds for r in runs),
        statistics.median(r.cpu_seconds for r in runs),
        max(r.peak_anonymous for r in runs),
    )


def store(path: Path | None, params: str, found: dict[str, Any], added: bool) -> None:
    """Add to what is stored, so that methods may be measured in several sittings."""
    if path is None:
        return
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    before = before if before.get("params") == params else {}
    methods = before.get("methods", {}) | found.get("methods", {})
    record(path, {"params": params} | before | found | {"methods": methods}, [0], added)


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Path]]:
    """The options, with those of every comparison with a plain copy, and the models they ask for."""
    parser.add_argument("--params", default="1.1B", help="size of the models, e.g. 1.1B or 200M")
    parser.add_argument("--workdir", type=Path, default=Path(tempfile.gettempdir()) / "merganser-speed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="200M parameters, one repetition")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.params, options.repeat = "200M", 1
    factor = {"M": 1e6, "B": 1e9}[options.params[-1].upper()]
    options.workdir.mkdir(parents=True, exist_ok=True)
    return options, make_checkpoints(options.workdir, float(options.params[:-1]) * factor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--mergekit", type=Path, help="bin directory of an environment with mergekit")
    parser.add_argument("--mergekit-methods", nargs="+", default=None, help="only these with mergekit")
    options, paths = begin(parser)
    out = options.workdir / "out"
    added = set(options.methods) != set(METHODS)
    start = statistics.median(startup() for _ in range(3))
    print(f"{describe()}\nstart-up of Python, torch and merganser: {start:.2f} s")
    print(f"{'method':<16}{'ours s':>8}{'CPU s':>8}{'anon MiB':>10}{'limit s':>9}{'ratio':>7}", end="")
    print(f"{'mergekit s':>12}{'ratio':>7}{'anon MiB':>10}")
    for method in options.methods:
        document = recipe(method, paths)
        config = options.workdir / f"{method}.json"
        config.write_text(json.dumps(document))
        used = paths[:2] if method == "slerp" else paths[1:] if method == "linear" else paths
        warm(used)
        ours, floor, theirs = [], [], []
        for _ in range(options.repeat):
            floor.append(limit(used, out))
            ours.append(measure([sys.executable, "-m", "merganser", "merge", str(config), str(out)], out))
        if options.mergekit and method in (options.mergekit_methods or options.methods):
            command = [str(options.mergekit / "mergekit-yaml"), str(config), str(out), "--no-copy-tokenizer"]
            theirs.append(measure(command, out, {"HF_HUB_OFFLINE": "1"}))
        shutil.rmtree(out, ignore_errors=True)
        our, low = median(ours), median(floor)
        row = {"ours": asdict(our), "limit": asdict(low), "ratio_to_limit": (our.seconds - start) / low.seconds}
        line = f"{method:<16}{our.seconds:>8.2f}{our.cpu_seconds:>8.1f}{our.peak_anonymous / 2**20:>10.0f}"
        line += f"{low.seconds:>9.2f}{row['ratio_to_limit']:>7.2f}"
        if theirs:
            peer = median(theirs)
            row |= {"mergekit": asdict(peer), "times_faster": peer.seconds / our.seconds}
            line += f"{peer.seconds:>12.1f}{row['times_faster']:>7.1f}{peer.peak_anonymous / 2**20:>10.0f}"
        else:
            line += f"{'–':>12}"
        print(line, flush=True)
        found = {"start_up": start, "numba": find_spec("numba") is not None, "methods": {method: row}}
        store(options.json, options.params, found, added)
    small = median([small_tensors(options.workdir) for _ in range(options.repeat)])
    usage = min(help_cpu() for _ in range(3))
    shutil.rmtree(out, ignore_errors=True)
    print(f"10,000 tensors of 64 entries, ties: {small.seconds:.1f} s, {small.cpu_seconds:.1f} s of CPU")
    print(f"merganser --help: {usage:.2f} s of CPU")
    store(options.json, options.params, {"small_tensors": asdict(small), "help_cpu_seconds": usage}, added)
    if not options.mergekit:
        print("mergekit: not given (--mergekit BIN), so not measured")


if __name__ == "__main__":
    main()
