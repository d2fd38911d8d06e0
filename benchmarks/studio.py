"""What a moved slider costs: a re-merge into the model in memory, beside the text it then writes, and the first page.

    python -m benchmarks.studio MODELS --base NAME --models NAME NAME

MODELS is a folder with a base and two fine-tunes of it that `transformers` loads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from merganser.studio.app import create_app
from merganser.studio.player import Player, Prompt
from merganser.studio.roots import Roots

TOKENS = 16


def measure(folder: Path, base: str, models: list[str], repeats: int) -> None:
    """Print processor seconds of a re-merge with one changed weight, as such and as a share of a text's."""
    player = Player(Roots([folder]))

    def document(method: str, weight: float, **parameters: float) -> dict[str, Any]:
        entries = [{"path": models[0], "weight": weight}, *({"path": path, "weight": 0.4} for path in models[1:])]
        return {"method": method, "base": base, "models": entries, "parameters": parameters}

    [first, *_] = player.play([document("task_arithmetic", 0.5)])
    print(f"first load        {first['processor']:6.2f} s of processor ({first['tensors']} tensors)")
    for method, parameters in (("task_arithmetic", {}), ("linear", {}), ("ties", {"density": 0.5})):
        merges, texts = [], []
        for step in range(repeats):
            found = player.play([document(method, 0.1 + 0.01 * step, **parameters)], Prompt("The", tokens=TOKENS))
            merged = next(found)
            merges.append(merged["processor"])
            began = time.process_time()
            tokens = sum(event["event"] == "token" for event in found)
            texts.append((time.process_time() - began) * TOKENS / max(1, tokens))
        best, text = min(merges[1:]), min(texts)
        print(
            f"{method:<17} {best:6.2f} s of processor (median {statistics.median(merges[1:]):.2f}), "
            f"{best / text:.2f} of the {text:.2f} s that {TOKENS} tokens take"
        )


def measure_limit(folder: Path, base: str, models: list[str], repeats: int) -> float:
    """Return the processor seconds of base + Σ w (model − base) in plain torch, whole tensors in memory: no planning,
    no blocks, no checks."""
    roots = Roots([folder])
    first, *others = [roots.open(name) for name in (base, *models)]
    names = [n for n in first.names() if any(not torch.equal(first.read(n), other.read(n)) for other in others)]
    tensors = [[opened.read(name) for opened in (first, *others)] for name in names]
    live = [each[0].float() for each in tensors]
    found = []
    for _ in range(repeats):
        began = time.process_time()
        for (zero, *tuned), target in zip(tensors, live, strict=True):
            origin = zero.float()
            total = origin.clone()
            for each in tuned:
                total.add_(each.float().sub_(origin), alpha=0.3)
            target.copy_(total.to(zero.dtype))
        found.append(time.process_time() - began)
    return min(found)


def open_home(folder: Path) -> None:
    """Print how long the page and its first data take, from a server that has just started."""
    from starlette.testclient import TestClient

    with tempfile.TemporaryDirectory() as state:
        client = TestClient(create_app([folder], Path(state), "t"), base_url="http://127.0.0.1:8765")
        began, worked = time.perf_counter(), time.process_time()
        sizes = [len(client.get(path).content) for path in ("/", "/studio.js", "/studio.css")]
        client.get("/api/home", headers={"authorization": "Bearer t"}).raise_for_status()
        seconds = time.perf_counter() - began
        print(f"first view        {seconds:6.2f} s, {time.process_time() - worked:.2f} s of processor")
        print(f"page              {sum(sizes) / 1000:6.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args()
    open_home(given.folder)
    limit = measure_limit(given.folder, given.base, given.models, given.repeats)
    print(f"plain torch       {limit:6.2f} s of processor: the same sum with nothing around it")
    measure(given.folder, given.base, given.models, given.repeats)


if __name__ == "__main__":
    main()
