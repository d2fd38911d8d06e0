"""Perplexity after giving a model another tokenizer, by rule, beside mergekit's tokensurgeon.

    python -m benchmarks.transplant --model SmolLM2 --donor stories15M --texts texts.txt --rules mean subwords omp:8
    python -m benchmarks.transplant … --peer /path/to/mergekit-tokensurgeon --peer-terms 8

`--texts` has one text on each line. Bits per byte compare models with different tokenizers; perplexity is per token of
the tokenizer in use. Processor seconds are those of the whole command, for ours and for the peer's.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from merganser.errors import require


def measure(model: Path, texts: Sequence[str], longest: int = 256) -> tuple[float, float]:
    """Perplexity per token, and bits per byte."""
    transformers = require("transformers", "hf")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loss, tokens, size = 0.0, 0, 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:longest]
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        batch = torch.tensor([first + ids])
        with torch.inference_mode():
            scores = network(batch).logits[0, :-1].log_softmax(-1)
        loss -= scores.gather(1, batch[0, 1:, None]).sum().item()
        tokens += batch.shape[1] - 1
        size += len(tokenizer.decode(ids).encode())
    return math.exp(loss / tokens), loss / size / math.log(2)


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
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--rules", nargs="+", default=["mean", "zero", "subwords", "nearest", "omp:8"])
    parser.add_argument("--peer", help="the command mergekit-tokensurgeon")
    parser.add_argument("--peer-terms", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts = [line for line in given.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    print(f"{'rule':24} {'perplexity':>10} {'bits/byte':>9} {'seconds':>8}")

    def show(name: str, path: Path, seconds: float = 0.0) -> None:
        perplexity, bits = measure(path, texts)
        print(f"{name:24} {perplexity:10.2f} {bits:9.4f} {seconds:8.1f}", flush=True)

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


if __name__ == "__main__":
    main()
