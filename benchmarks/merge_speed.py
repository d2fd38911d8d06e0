"""How fast a merge is: ours, the limit of the machine, and mergekit (in its own environment), in one run.

    python -m benchmarks.merge_speed [--params 1.1B] [--mergekit BIN] [--json FILE]

Makes Llama-shaped bfloat16 checkpoints (a base and three models) and merges them. The limit is a compiled program with
two threads that does the reading, arithmetic and writing of each method and nothing else (`benchmarks/limits`); without
a compiler it is left out. All sides find the inputs in the page cache, and all are charged for syncing what they wrote.
Start-up is what the same command takes for models of one small tensor: it is printed apart, and ratios to the limit
leave it out. Ratios are given for seconds and for processor seconds; on a busy machine only the latter mean much.
Memory is the peak of anonymous pages, sampled, of a program and its workers together (pages they share count once).
Takes about 30 minutes with mergekit at the default size, 5 without; needs 12 GB of disk for `--params 1.1B`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits import compile_limit, limit_command
from benchmarks.machine import describe
from benchmarks.measuring import Run, measure, median
from benchmarks.records import record
from merganser.kernels import tiles

HIDDEN, INTERMEDIATE, VOCABULARY, KV = 2048, 5632, 32000, 256
METHODS: dict[str, dict[str, object]] = {
    "linear": {"weight": 1.0},
    "task_arithmetic": {"weight": 0.4},
    "slerp": {"t": 0.4},
    "nuslerp": {"weight": 0.5},
    "model_stock": {},
    "dare_linear": {"weight": 0.4, "density": 0.5},
    "dare_ties": {"weight": 0.4, "density": 0.5},
    "breadcrumbs": {"weight": 0.4, "density": 0.2, "gamma": 0.01},
    "ties": {"weight": 0.4, "density": 0.2},
    "sce": {"select_topk": 0.1},
    "consensus_ta": {"weight": 0.4},
    "della": {"weight": 0.4, "density": 0.5, "epsilon": 0.2},
    "arcee_fusion": {},
    "ram": {},
}
#: How many models each takes besides the base, if not three, and what mergekit does not have.
MODELS = {"slerp": 1, "nuslerp": 2, "arcee_fusion": 1}
OURS_ALONE = {"consensus_ta", "ram"}


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


def inputs(method: str, paths: list[Path]) -> list[Path]:
    """The checkpoints that a method reads, the base first."""
    return paths[1:] if method == "linear" else paths[: 1 + MODELS.get(method, 3)]


def recipe(method: str, paths: list[Path]) -> dict[str, object]:
    """The same mergekit recipe for both programs; one of ours for what mergekit does not have."""
    base, *models = (str(path.absolute()) for path in paths[: 1 + MODELS.get(method, 3)])
    if method in OURS_ALONE:
        return {"method": method, "base": base, "models": models, "parameters": METHODS[method]}
    if method == "slerp":
        models = [base, *models]
    values = METHODS[method]
    per_model = {k: v for k, v in values.items() if k in ("weight", "density", "gamma", "epsilon")}
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


def limit(program: Path, method: str, paths: list[Path], out: Path) -> Run:
    """The work of a method on these checkpoints, compiled."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    return measure(limit_command(program, method, paths, out), out, keep=True)


def startup(directory: Path, with_torch: bool = False) -> Run:
    """A merge of one small tensor: what Python, planning, writing and, if needed, torch cost apart from weights."""
    from safetensors.torch import save_file

    path = directory / "one-tensor"
    path.mkdir(exist_ok=True)
    save_file({"w": torch.ones(8, 8)}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text("{}")
    config = directory / "start.json"
    method = {"method": "pcb", "base": str(path)} if with_torch else {"method": "linear"}
    config.write_text(json.dumps({**method, "models": [str(path)]}))
    return median([merge(config, directory / "out") for _ in range(3)])


def merge(config: Path, out: Path) -> Run:
    return measure([sys.executable, "-m", "merganser", "merge", str(config), str(out)], out)


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
    return merge(config, directory / "out")


def help_cpu() -> float:
    """CPU seconds of `merganser --help`."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "merganser", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def store(path: Path | None, params: str, found: dict[str, Any], added: bool) -> None:
    """Add to what is stored, so that methods may be measured in several sittings."""
    if path is None:
        return
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    before = before if before.get("params") == params else {}
    methods = before.get("methods", {}) | found.get("methods", {})
    record(path, {"params": params} | before | found | {"methods": methods}, [0], added)


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Path]]:
    """The options, with those of every comparison with the limit, and the models they ask for."""
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


def compare(sides: dict[str, Run], start: Run) -> dict[str, Any]:
    """The sides, how many limits ours takes without start-up, and how many times faster it is than mergekit."""
    row: dict[str, Any] = {name: asdict(run) for name, run in sides.items()}
    ours = sides["ours"]
    if low := sides.get("limit"):
        row["ratio_to_limit"] = (ours.seconds - start.seconds) / low.seconds
        row["cpu_ratio_to_limit"] = (ours.cpu_seconds - start.cpu_seconds) / low.cpu_seconds
    if peer := sides.get("mergekit"):
        row["times_faster"] = peer.seconds / ours.seconds
    return row


def cells(row: dict[str, Any]) -> list[str]:
    found = []
    for side in ("ours", "limit", "mergekit"):
        run = row.get(side)
        found += [f"{run['seconds']:.2f}", f"{run['cpu_seconds']:.2f}"] if run else ["–", "–"]
        if side != "limit":
            found.append(f"{run['peak_anonymous'] / 2**20:.0f}" if run else "–")
        else:
            found += [f"{row[ratio]:.2f}" if run else "–" for ratio in ("ratio_to_limit", "cpu_ratio_to_limit")]
    return [*found, f"{row['times_faster']:.1f}" if "times_faster" in row else "–"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--mergekit", type=Path, help="bin directory of an environment with mergekit")
    parser.add_argument("--mergekit-methods", nargs="+", default=None, help="only these with mergekit")
    options, paths = begin(parser)
    out = options.workdir / "out"
    added = set(options.methods) != set(METHODS)
    program = compile_limit(options.workdir)
    start = startup(options.workdir)
    compiled = tiles.library() is not None
    print(f"{describe()}{'' if compiled else '; without the compiled runner'}")
    print(f"start-up: {start.seconds:.2f} s, {start.cpu_seconds:.2f} s of processor")
    heads = (
        "method",
        "ours s",
        "CPU s",
        "MiB",
        "limit s",
        "CPU s",
        "ratio",
        "CPU ratio",
        "mergekit s",
        "CPU s",
        "MiB",
        "×",
    )
    print(f"{heads[0]:<16}" + "".join(f"{head:>11}" for head in heads[1:]))
    for method in options.methods:
        config = options.workdir / f"{method}.json"
        config.write_text(json.dumps(recipe(method, paths)))
        used = inputs(method, paths)
        warm(used)
        sides: dict[str, list[Run]] = {}
        for turn in range(options.repeat):
            if program is not None:
                sides.setdefault("limit", []).append(limit(program, method, used, out))
            sides.setdefault("ours", []).append(merge(config, out))
            peer = options.mergekit if method not in OURS_ALONE and turn == 0 else None
            if peer and method in (options.mergekit_methods or options.methods):
                command = [str(peer / "mergekit-yaml"), str(config), str(out), "--no-copy-tokenizer"]
                sides["mergekit"] = [measure(command, out, {"HF_HUB_OFFLINE": "1"})]
        shutil.rmtree(out, ignore_errors=True)
        row = compare({name: median(runs) for name, runs in sides.items()}, start)
        print(f"{method:<16}" + "".join(f"{cell:>11}" for cell in cells(row)), flush=True)
        found = {
            "start_up": start.seconds,
            "start_up_cpu": start.cpu_seconds,
            "compiled": compiled,
            "methods": {method: row},
        }
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
