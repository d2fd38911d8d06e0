"""Networks that differ: zipped halves of a task, widths and depths, beside ensembles, averages and permutations.

    python -m benchmarks.zip --data DIR [--cache DIR] [--parts halves widths depths] [--seed 0] [--json FILE]

On Fashion-MNIST, one thread. `halves`: two small CNNs, each trained on five of the ten classes; *joint* accuracy is
over all ten (the classes of both heads side by side), *own* accuracy within each half. `widths`: MLPs of width 256 and
512 for all ten classes, zipped into either shape. `depths`: patch transformers of four and six blocks. Statistics of
BatchNorm are computed anew for every network that is made. Training takes about five minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.alignment_training import Task, ViT, _initialise, fit, images
from benchmarks.records import record
from merganser.align import match_to_reference, repair, reset_batch_norm, stretch, symmetry
from merganser.align import zip as zip_models
from merganser.align.multi_head import MultiHead, tail_tensors
from merganser.align.state import average

Rows = list[dict[str, Any]]


def cnn(classes: int = 5) -> nn.Sequential:
    """Four convolutions with BatchNorm, pooled."""

    def stage(into: int, out: int, pool: bool) -> list[nn.Module]:
        layers: list[nn.Module] = [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)] if pool else layers

    body = [*stage(1, 24, True), *stage(24, 48, True), *stage(48, 64, False), *stage(64, 64, False)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def mlp(width: int) -> nn.Sequential:
    hidden = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def trained(
    name: str, make: Callable[[], nn.Module], task: Task, steps: int, seed: int, cache: Path | None
) -> nn.Module:
    """One cycle of AdamW, or what the cache has."""
    torch.manual_seed(seed)
    path = cache / f"zip-{name}-{seed}-{steps}.safetensors" if cache else None
    return fit(make(), task.batches(64, seed), steps, 3e-3, 0.05, path)


def half(task: Task, classes: Tensor) -> Task:
    """The images of some classes, which are counted from 0."""

    def chosen(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.isin(targets, classes)
        return inputs[found].reshape(-1, 1, 28, 28), torch.searchsorted(classes, targets[found])

    return Task(*chosen(task.inputs, task.targets), *chosen(task.test_inputs, task.test_targets))


@torch.no_grad()
def outputs(network: nn.Module, inputs: Tensor) -> Any:
    parts = [network(x) for x in inputs.split(500)]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(own) for own in zip(*parts, strict=True))
    return torch.cat(parts)


def accuracy(logits: Tensor, targets: Tensor) -> float:
    return float((logits.argmax(1) == targets).double().mean())


def halves(task: Task, seed: int, cache: Path | None) -> Rows:
    """Two CNNs with five classes each, as one network with two heads."""
    classes = [torch.arange(0, 5), torch.arange(5, 10)]
    tasks = [half(task, own) for own in classes]
    networks = [trained(f"cnn{i}", cnn, own, 700, seed + i, cache) for i, own in enumerate(tasks)]
    both = [torch.cat([x, y]) for (x, _), (y, _) in islice(zip(*(t.batches(64, 99) for t in tasks), strict=True), 16)]
    inputs = torch.cat([own.test_inputs for own in tasks])
    labels = torch.cat([own.test_targets + 5 * i for i, own in enumerate(tasks)])
    rows: Rows = []

    def add(method: str, until: str, heads: Sequence[Tensor], network: nn.Module | None = None) -> None:
        joined = torch.cat([head.log_softmax(1) for head in heads], dim=1)
        cut = len(tasks[0].test_inputs)
        own = [accuracy(heads[0][:cut], labels[:cut]), accuracy(heads[1][cut:], labels[cut:] - 5)]
        size = (
            sum(p.numel() for p in network.parameters())
            if network
            else sum(p.numel() for p in networks[0].parameters()) * 2
        )
        rows.append(
            {
                "method": method,
                "separate": until,
                "joint": accuracy(joined, labels),
                "own": sum(own) / 2,
                "weights": size,
            }
        )

    add("ensemble of both", "everything", [outputs(network, inputs) for network in networks])
    known = symmetry(networks[0], both[0][:2])
    moved = match_to_reference(networks, known, method="activations", batches=both, standardize=True, workers=1)
    plain = [dict(network.state_dict()) for network in networks]
    for layer, name in (("16", "heads"), ("11", "heads and one convolution"), ("8", "heads and two convolutions")):
        tail = tail_tensors(networks[0], both, layer)
        shared = frozenset(plain[0]) - tail
        for method, states in (
            ("plain average", plain),
            ("permutations", [moved.to_universe(i) for i in range(2)]),
        ):
            mean = average(states)
            own = [{n: t if n in tail else mean[n] for n, t in state.items()} for state in states]
            network = reset_batch_norm(MultiHead.of(networks[0], own, shared), both)
            add(method, name, outputs(network.eval(), inputs), network)
        network = reset_batch_norm(zip_models(networks, known, both, until=layer).module(networks[0]), both)
        add("zip", name, outputs(network.eval(), inputs), network)
    return rows


def widths(task: Task, seed: int, cache: Path | None) -> Rows:
    """MLPs of two widths, as one of either."""
    networks = [trained(f"mlp{w}", lambda w=w: mlp(w), task, 900, seed + w, cache) for w in (256, 512)]
    inputs, labels = task.test_inputs, task.test_targets
    logits = [outputs(network, inputs) for network in networks]
    batches = [x for x, _ in islice(task.batches(256, 99), 16)]
    known = [symmetry(network, batches[0][:2]) for network in networks]
    rows = [
        {"method": f"width {w}", "accuracy": accuracy(own, labels)} for w, own in zip((256, 512), logits, strict=True)
    ]
    rows.append({"method": "ensemble of both", "accuracy": accuracy(sum(own.softmax(1) for own in logits), labels)})
    small, large = (dict(network.state_dict()) for network in networks)
    padded = {
        n: pad(t, [x for a, b in zip(large[n].shape[::-1], t.shape[::-1], strict=True) for x in (0, a - b)])
        for n, t in small.items()
    }
    made = mlp(512)
    made.load_state_dict(average([padded, large]))
    rows.append(
        {"method": "average, the small one padded with zeros", "accuracy": accuracy(outputs(made, inputs), labels)}
    )
    for width, target, template in ((512, known[1], networks[1]), (256, known[0], networks[0])):
        found = zip_models(networks, known, batches, into=target).module(template)
        rows.append({"method": f"zip into width {width}", "accuracy": accuracy(outputs(found, inputs), labels)})
    alone = zip_models([networks[1], networks[1]], known[1], batches, into=known[0]).module(networks[0])
    rows.append({"method": "width 512 zipped alone into 256", "accuracy": accuracy(outputs(alone, inputs), labels)})
    return rows


def depths(task: Task, seed: int, cache: Path | None) -> Rows:
    """Patch transformers of four and six blocks, as one of six."""

    def make(depth: int) -> Callable[[], nn.Module]:
        return lambda: ViT(width=32, depth=depth).apply(_initialise)

    networks = [trained(f"vit{depth}", make(depth), task, 700, seed + depth, cache) for depth in (4, 6)]
    inputs, labels = task.test_inputs[:4000], task.test_targets[:4000]
    logits = [outputs(network, inputs) for network in networks]
    batches = [x for x, _ in islice(task.batches(64, 99), 8)]
    rows = [{"method": f"{d} blocks", "accuracy": accuracy(own, labels)} for d, own in zip((4, 6), logits, strict=True)]
    rows.append({"method": "ensemble of both", "accuracy": accuracy(sum(own.softmax(1) for own in logits), labels)})
    blocks = next(name for name, part in networks[0].named_modules() if isinstance(part, nn.ModuleList | nn.Sequential))
    found = stretch(networks[0], networks[1], batches, blocks=blocks)
    longer = make(6)()
    longer.load_state_dict(found.state)
    row = {"method": "4 blocks stretched to 6", "accuracy": accuracy(outputs(longer.eval(), inputs), labels)}
    rows.append({**row, "plan": list(found.plan)})
    for kind in ("plain", "permutation", "orthogonal"):
        known = symmetry(longer, batches[0][:2], kind="orthogonal" if kind == "orthogonal" else "permutation")
        known = known.pin("*") if kind == "plain" else known
        moved = match_to_reference(
            [networks[1], longer], known, method="activations", batches=batches, standardize=True, workers=1
        )
        middle = make(6)()
        middle.load_state_dict(moved.merged())
        in_place = [moved.to_universe(i) for i in range(2)]
        for name, network in ((kind, middle.eval()), (f"{kind}, repaired", repair(middle, in_place, batches).eval())):
            rows.append({"method": f"average, {name}", "accuracy": accuracy(outputs(network, inputs), labels)})
    return rows


PARTS = {"halves": halves, "widths": widths, "depths": depths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    task = images(given.data)
    results = {}
    for part in given.parts:
        results[part] = PARTS[part](task, given.seed, given.cache)
        print(part)
        for row in results[part]:
            print("  ", "  ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    record(given.json, results, [given.seed])


if __name__ == "__main__":
    main()
