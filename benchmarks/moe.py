"""Dense experts as one mixture: perplexity by gate, beside dense merges and the experts themselves.

    python -m benchmarks.moe --base DIR --data DIR [--cache DIR] [--steps 40] [--gate NAME …] [--json FILE]

Fine-tunes a small Llama model (`--base`, e.g. stories15M) on three kinds of text: word problems, film reviews and
requests to an assistant; two minutes with one thread. Gates that need prompts get eight training texts of each
kind; `singular` gets none. The base with the MLPs of the right expert for every text is what a perfect gate would give.
Perplexity is on test texts, the tokens of each kind by themselves; the mean is geometric. `--gate` measures some gates
again (`right`: the perfect one), and keeps the other rows of the file.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import merganser as mg
from benchmarks.language_texts import KINDS, perplexity, texts
from benchmarks.records import record
from merganser.errors import require

RIGHT = "right"
GATES = (RIGHT, "hidden", "hidden_avg", "cheap_embed", "random", "uniform_random", "singular")
MERGES: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {"scale": 1.0},
    "ties": {"density": 0.2, "scale": 1.0},
    "tsv": {"scale": 1.0},
}
LENGTH, SIZE = 128, 4


def finetune(base: Path, kind: str, data: Path, steps: int, out: Path) -> Path:
    """AdamW on packed texts, unless `out` has it already."""
    if (out / "config.json").exists():
        return out
    transformers = require("transformers", "hf")
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids: list[int] = []
    for text in texts(data, kind, "train", 4000):
        ids += [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)
    optimiser = torch.optim.AdamW(network.parameters(), 5e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-4, total_steps=steps, pct_start=0.1)
    order = torch.cat([torch.randperm(len(rows)) for _ in range(1 + steps * SIZE // len(rows))])
    for chosen in islice(order.split(SIZE), steps):
        optimiser.zero_grad()
        network(rows[chosen], labels=rows[chosen]).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    network.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def scores(model: Path, test: dict[str, list[str]], mlps: Mapping[str, Path] | None = None) -> dict[str, float]:
    """Perplexity on every kind of text, and their geometric mean; with `mlps`, those of an expert for each kind."""
    transformers = require("transformers", "hf")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    found = {}
    for kind, own in test.items():
        if mlps is not None:
            expert = mg.open(mlps[kind])
            network.load_state_dict({name: expert[name] for name in expert if ".mlp." in name}, strict=False)
        found[kind] = perplexity(network, tokenizer, own)[0]
    return found | {"mean": math.exp(sum(map(math.log, found.values())) / len(found))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--count", type=int, default=30, help="test texts of each kind")
    parser.add_argument("--gate", nargs="+", choices=GATES)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    test = {kind: texts(given.data, kind, "test", given.count) for kind in KINDS}
    again = given.gate is not None and given.json is not None and given.json.exists()
    kept = json.loads(given.json.read_text())["results"]["rows"] if again else []
    rows: list[dict[str, Any]] = []

    def show(name: str, per_token: int | None, path: Path, mlps: Mapping[str, Path] | None = None) -> None:
        rows.append({"model": name, "experts_per_token": per_token, **scores(path, test, mlps)})
        print(f"{name:28}", *(f"{rows[-1][kind]:9.2f}" for kind in (*KINDS, "mean")), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        cache, place = given.cache or Path(scratch), Path(scratch)
        experts = {
            kind: finetune(given.base, kind, given.data, given.steps, cache / f"moe-{kind}-{given.steps}")
            for kind in KINDS
        }
        if not given.gate:
            show("base", None, given.base)
            for kind, path in experts.items():
                show(f"expert of {kind}", None, path)
        for method, settings in MERGES.items() if not given.gate else ():
            document = {"method": method, "models": [*map(str, experts.values())], "base": str(given.base)}
            out = mg.run({**document, "parameters": settings}, place / method)
            show(f"merged, {method}", None, out)
        for gate in given.gate or GATES:
            if gate == RIGHT:
                show("the right expert's MLPs", None, given.base, experts)
                continue
            for per_token in (1, 2):
                entries = [
                    {"source_model": str(path), "positive_prompts": texts(given.data, kind, "train", 8)}
                    for kind, path in experts.items()
                ]
                document = {"base_model": str(given.base), "gate_mode": gate, "experts": entries}
                made = mg.surgery.moe({**document, "experts_per_token": per_token})
                out = mg.save(made, place / f"{gate}{per_token}")
                show(f"mixture, {gate}, top {per_token}", per_token, out)
    fresh = {row["model"]: row for row in rows}
    rows = [fresh.pop(row["model"], row) for row in kept] + list(fresh.values())
    record(given.json, {"base": given.base.name, "rows": rows}, [0], added=again)


if __name__ == "__main__":
    main()
