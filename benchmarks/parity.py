"""Do our results equal mergekit's? The same recipes, float32, both programs, one table.

    python -m benchmarks.parity --mergekit BIN [--json FILE] [--markdown]

BIN is the bin directory of an environment with mergekit. Makes a tiny Llama and three fine-tunes of it, runs every
shared deterministic method through both and prints the largest difference, relative to the largest weight and
(stricter) to the largest change of a weight.
Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import merganser as mg
from benchmarks.machine import describe
from benchmarks.records import record

HIDDEN, INNER, VOCABULARY, LAYERS = 64, 160, 128, 3
AGREE = 1e-5

#: method -> (parameters for all, parameters per model, models besides the base, base)
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], bool]] = {
    "linear": ("linear", {}, [{"weight": 0.2}, {"weight": 0.5}, {"weight": 0.3}], False),
    "linear, not normalised": ("linear", {"normalize": False}, [{"weight": 0.2}, {"weight": 0.5}], False),
    "slerp": ("slerp", {"t": [0.2, 0.8]}, [{}], True),
    "nuslerp": ("nuslerp", {}, [{"weight": 0.4}, {"weight": 0.6}], False),
    "nuslerp, row-wise around a base": (
        "nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}, [{"weight": 0.4}, {"weight": 0.6}], True,
    ),
    "multislerp": ("multislerp", {}, [{"weight": 0.4}, {"weight": 0.3}, {"weight": 0.3}], False),
    "karcher": ("karcher", {}, [{}, {}, {}], False),
    "task_arithmetic": ("task_arithmetic", {"lambda": 0.8}, [{"weight": 0.4}, {"weight": 0.3}, {"weight": 0.6}], True),
    "ties": ("ties", {}, [{"weight": 0.4, "density": 0.3}, {"weight": 0.6, "density": 0.5}], True),
    "ties, not normalised": (
        "ties", {"normalize": False}, [{"weight": 0.4, "density": 0.3}, {"weight": 0.6, "density": 1.0}], True,
    ),
    "breadcrumbs": ("breadcrumbs", {}, [{"weight": 0.5, "density": 0.8, "gamma": 0.05}] * 2, True),
    "breadcrumbs_ties": ("breadcrumbs_ties", {}, [{"weight": 0.5, "density": 0.8, "gamma": 0.05}] * 2, True),
    "model_stock": ("model_stock", {}, [{}, {}, {}], True),
    "sce": ("sce", {"select_topk": 0.4}, [{}, {}, {}], True),
    "nearswap": ("nearswap", {"t": 0.001}, [{}], True),
    "arcee_fusion": ("arcee_fusion", {}, [{}], True),
    "ram": ("ram", {"epsilon": 1e-3}, [{}, {}, {}], True),
    "ramplus_tl": ("ramplus_tl", {"epsilon": 1e-3}, [{}, {}, {}], True),
}  # fmt: skip

PEER = """
import json, sys, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
failures = {}
for name, (document, out) in json.load(open(sys.argv[1])).items():
    try:
        run_merge(MergeConfiguration.model_validate(document), out, MergeOptions(copy_tokenizer=False, quiet=True))
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
json.dump(failures, open(sys.argv[2], "w"))
"""
Document = dict[str, Any]


def run_peer(mergekit: Path, directory: Path, jobs: Mapping[str, tuple[Document, str]]) -> dict[str, str]:
    """Run every document through mergekit; returns what it refused, by the name of the job."""
    todo, failures = directory / "jobs.json", directory / "failures.json"
    todo.write_text(json.dumps(jobs))
    command = [str(mergekit / "python"), "-c", PEER, str(todo), str(failures)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, str] = json.loads(failures.read_text())
    return found


def make_models(directory: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{p}_proj.weight": (HIDDEN, HIDDEN) for p in "qkvo"}
        shapes |= {f"{prefix}.mlp.{p}_proj.weight": (INNER, HIDDEN) for p in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{prefix}.{p}_layernorm.weight": (HIDDEN,) for p in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": VOCABULARY, "torch_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    base = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    paths = []
    for label in ("base", "a", "b", "c"):
        scale = 0.0 if label == "base" else 0.005
        tensors = {k: v + scale * torch.randn(v.shape, generator=generator) for k, v in base.items()}
        paths.append(directory / label)
        paths[-1].mkdir()
        save_file(tensors, paths[-1] / "model.safetensors", {"format": "pt"})
        (paths[-1] / "config.json").write_text(json.dumps(config))
    return paths


def document(case: str, paths: list[Path]) -> dict[str, Any]:
    method, parameters, each, with_base = CASES[case]
    base, *models = map(str, paths)
    entries = [{"model": m, "parameters": p} for m, p in zip(models, each, strict=False)]
    if method == "slerp":
        entries.insert(0, {"model": base, "parameters": {}})
    found: dict[str, Any] = {"merge_method": method, "models": entries, "parameters": parameters, "dtype": "float32"}
    return found | ({"base_model": base} if with_base else {})


def difference(ours: Path, theirs: Path, base: Path) -> dict[str, float]:
    """max |ours − theirs| over max |theirs|, and over max |theirs − base|."""
    a, b, zero = mg.open(ours), mg.open(theirs), mg.open(base)
    assert set(a.names()) == set(b.names())
    gap = max(float((a.read(n) - b.read(n)).abs().max()) for n in b.names())
    weight = max(float(b.read(n).abs().max()) for n in b.names())
    change = max(float((b.read(n) - zero.read(n)).abs().max()) for n in b.names())
    return {"of_weight": gap / weight, "of_change": gap / change if change else math.inf}


def parse_options(about: str | None) -> argparse.Namespace | None:
    """Return the options of a comparison with mergekit; None, said, without mergekit."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", type=Path, help="bin directory of an environment with mergekit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    if options.mergekit is None:
        print("mergekit: not given (--mergekit BIN), so there is nothing to compare with")
        return None
    return options


def main() -> None:
    if (options := parse_options(__doc__)) is None:
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        paths = make_models(directory)
        jobs = {case: (document(case, paths), str(directory / f"theirs-{i}")) for i, case in enumerate(CASES)}
        if failures := run_peer(options.mergekit, directory, jobs):
            raise SystemExit(f"mergekit refused {failures}")
        results = {}
        for number, (case, (recipe, theirs)) in enumerate(jobs.items()):
            ours = mg.run(recipe, directory / f"ours-{number}")
            results[case] = difference(ours, Path(theirs), paths[0])
    line = "| {} | {:.1e} | {:.1e} | {} |" if options.markdown else "{:<34}{:>10.1e}{:>10.1e}  {}"
    print(describe())
    for case, gap in results.items():
        verdict = "equal" if gap["of_weight"] <= AGREE else "differs"
        print(line.format(case, gap["of_weight"], gap["of_change"], verdict))
    record(options.json, results, [0])


if __name__ == "__main__":
    main()
