"""Perplexity after giving a model another tokenizer, by rule, beside mergekit's tokensurgeon.

    python -m benchmarks.transplant --model DIR --donor DIR --data DIR [--rules mean subwords omp:8] [--json FILE]
    python -m benchmarks.transplant … --peer /path/to/mergekit-tokensurgeon --peer-terms 8

On word problems and film reviews of the test sets. Bits per byte compare models with different tokenizers; perplexity
is per token of the tokenizer in use. Processor seconds are those of the whole command with one thread, for ours and for
the peer's.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.language_texts import perplexity, texts
from benchmarks.records import record
from merganser.errors import require


def measure(model: Path, chosen: Sequence[str]) -> tuple[float, float]:
    transformers = require("transformers", "hf")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return perplexity(network, transformers.AutoTokenizer.from_pretrained(model), chosen)


def run(command: Sequence[str]) -> float:
    """Processor seconds of a command with one thread."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--donor", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16, help="texts of each kind")
    parser.add_argument("--rules", nargs="+", default=["mean", "zero", "subwords", "nearest", "omp:8"])
    parser.add_argument("--peer", help="the command mergekit-tokensurgeon")
    parser.add_argument("--peer-terms", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [text for kind in ("gsm8k", "mr") for text in texts(given.data, kind, "test", given.count)]
    rows: list[dict[str, Any]] = []

    def show(name: str, path: Path, seconds: float | None = None) -> None:
        found, bits = measure(path, chosen)
        rows.append({"rule": name, "perplexity": found, "bits_per_byte": bits, "cpu_seconds": seconds})
        print(f"{name:24} {found:10.2f} {bits:9.4f} {seconds or 0:8.1f}", flush=True)

    show("as it was", given.model)
    with tempfile.TemporaryDirectory() as scratch:
        for i, spec in enumerate(given.rules):
            rule, _, terms = spec.partition(":")
            out = Path(scratch) / str(i)
            words = ["transplant-tokenizer", str(given.model), "--from", str(given.donor), str(out), "--absent", rule]
            words += ["--terms", terms] if terms else []
            show(spec, out, run([sys.executable, "-m", "merganser", *words, "--workers", "1"]))
        if given.peer:
            out, terms = Path(scratch) / "peer", str(given.peer_terms)
            seconds = run([given.peer, str(given.model), str(given.donor), str(out), "-a", "omp", "-k", terms])
            show(f"tokensurgeon omp:{terms}", out, seconds)
    results = {"model": given.model.name, "donor": given.donor.name, "texts": len(chosen), "rows": rows}
    record(given.json, results, [])


if __name__ == "__main__":
    main()
