"""IRT: our fit against py-irt on the same simulated answers, in the same run.

    python -m benchmarks.irt --py-irt PATH/TO/OTHER/ENVIRONMENT/bin/python [--quick] [--json FILE]

py-irt needs an environment of its own (pip install py-irt==0.7.1). A tenth of the answers is hidden from both fits and
scored by both. py-irt's multidimensional model has positive discriminations, so the simulation has them too. Times are
CPU seconds of the fits alone (run with OMP_NUM_THREADS=1), which other work on the machine hardly disturbs. Goal: at
least 50 times faster, held-out log-loss no worse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

from benchmarks.records import record

PEER = """
import json, sys, time
import numpy as np
import pyro
from py_irt.config import IrtConfig
from py_irt.training import IrtModelTrainer
source, target = sys.argv[1], sys.argv[4]
dimensions, epochs, rate = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[5])
config = IrtConfig(
    model_type="multidim_2pl", dims=dimensions, epochs=epochs, lr=rate, priors="hierarchical", seed=42,
    deterministic=True,
)
pyro.set_rng_seed(42)  # the trainer itself leaves the seed of its configuration unused
trainer = IrtModelTrainer(config=config, data_path=source, verbose=False)
began = time.process_time()
trainer.train(device="cpu")
seconds = time.process_time() - began
found = trainer.last_params
subjects = np.argsort([int(v) for _, v in sorted(found["subject_ids"].items())])
items = np.argsort([int(v) for _, v in sorted(found["item_ids"].items())])
np.savez(
    target,
    seconds=seconds,
    ability=np.array(found["ability"])[subjects],
    diff=np.array(found["diff"])[items],
    disc=np.array(found["disc"])[items],
)
"""


def simulate(models: int, items: int, dimensions: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers, and their true probabilities."""
    rng = np.random.default_rng(seed)
    ability = rng.normal(size=(models, dimensions))
    discrimination = rng.lognormal(0, 0.5, size=(items, dimensions)) / dimensions**0.5
    p = expit(ability @ discrimination.T - rng.normal(size=items))
    return (rng.random(p.shape) < p).astype(float), p


def log_loss(logits: np.ndarray, answers: np.ndarray, where: np.ndarray) -> float:
    return float((np.logaddexp(0, logits) - answers * logits)[where].mean())


@dataclass(frozen=True)
class Peer:
    """CPU seconds of py-irt's training alone (not its start or its reading), its logits, and its learning rate."""

    seconds: float
    logits: np.ndarray
    rate: float


def peer(python: str, answers: np.ndarray, known: np.ndarray, dimensions: int, epochs: int) -> Peer | None:
    """py-irt at the largest learning rate, from its default down, at which it does not end in NaN; None if at none."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "answers.jsonlines"), Path(folder, "fit.npz")
        with source.open("w") as file:
            for m, (row, seen) in enumerate(zip(answers, known, strict=True)):
                responses = {str(i): int(row[i]) for i in np.flatnonzero(seen)}
                file.write(json.dumps({"subject_id": str(m), "responses": responses}) + "\n")
        for rate in (0.1, 0.03, 0.01):
            arguments = [python, "-c", PEER, str(source), str(dimensions), str(epochs), str(target), str(rate)]
            done = subprocess.run(arguments, capture_output=True, text=True)
            if done.returncode == 0:
                with np.load(target) as found:
                    shift = (found["disc"] * found["diff"]).sum(1)
                    return Peer(float(found["seconds"]), found["ability"] @ found["disc"].T - shift, rate)
            if "found invalid values" not in done.stderr:
                raise RuntimeError(f"py-irt failed:\n{done.stderr[-2000:]}")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--py-irt", metavar="PYTHON", help="python of an environment with py-irt")
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--planted", type=int, default=3, help="dimensions of the simulation")
    parser.add_argument("--dimensions", type=int, nargs="+", default=[3, 15], help="dimensions both fit")
    parser.add_argument("--epochs", type=int, default=2000, help="py-irt's (its default)")
    parser.add_argument("--repeats", type=int, default=3, help="of our fit; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="60 × 100 answers, 100 epochs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.models, options.items, options.epochs, options.dimensions = 60, 100, 100, [3]

    from merganser.evolve.irt import fit

    answers, truth = simulate(options.models, options.items, options.planted, options.seed)
    known = np.random.default_rng(options.seed + 1).random(answers.shape) >= 0.1
    entropy = float(-(truth * np.log(truth) + (1 - truth) * np.log(1 - truth))[~known].mean())
    fit(answers[:20, :20], dimensions=1)
    print(f"{options.models} × {options.items} answers, {options.planted} dimensions planted")
    print(f"held-out log-loss of the true probabilities: {entropy:.4f}")
    results = []
    peers: dict[int, Peer | None] = {}
    for dimensions in [*options.dimensions, None]:
        seconds = []
        for _ in range(options.repeats):
            began = time.process_time()
            ours = fit(answers, known, dimensions=dimensions)
            seconds.append(time.process_time() - began)
        logits = ours.abilities @ ours.items.discrimination.T - ours.items.difficulty
        row = {
            "dimensions": dimensions or ours.dimensions,
            "chosen": dimensions is None,
            "seconds": float(np.median(seconds)),
            "log_loss": log_loss(logits, answers, ~known),
        }
        what = f"chosen: {ours.dimensions}" if dimensions is None else str(dimensions)
        line = f"dimensions {what}: ours {row['seconds']:.2f} s, log-loss {row['log_loss']:.4f}"
        if options.py_irt:
            against = dimensions or options.dimensions[0]
            if against not in peers:
                peers[against] = peer(options.py_irt, answers, known, against, options.epochs)
            other = peers[against]
            if other is None:
                line += f"; py-irt at {against} ended in NaN at every learning rate"
            else:
                row |= {"peer_seconds": other.seconds, "peer_log_loss": log_loss(other.logits, answers, ~known)}
                row |= {"peer_rate": other.rate, "times_faster": other.seconds / row["seconds"]}
                line += (
                    f"; py-irt at {against} (learning rate {other.rate}): {other.seconds:.1f} s, log-loss "
                    f"{row['peer_log_loss']:.4f}; {row['times_faster']:.0f} × faster"
                )
        print(line, flush=True)
        results.append(row)
    if not options.py_irt:
        print("py-irt was not given (--py-irt PYTHON), so there is nothing to compare with")
    record(options.json, {"entropy": entropy, "fits": results}, [options.seed])


if __name__ == "__main__":
    main()
