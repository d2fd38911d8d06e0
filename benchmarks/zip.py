"""Networks that differ: zipped halves of a task, widths and depths, beside ensembles, averages and permutations.

    python -m benchmarks.zip --data DIR [--cache DIR] [--parts PART ...] [--seed 0] [--json FILE]

On Fashion-MNIST, one thread. `halves`: two small CNNs, each trained on five of the ten classes; *joint* accuracy is
over all ten (the classes of both heads side by side), *own* accuracy within each half; `cifar10_halves`: the same on
CIFAR-10, trained in bfloat16 (see `zoo/vision.py` for what that needs). Errors are standard errors over test images;
*ahead* is how far zip is ahead of permutations on the same images. `widths`: MLPs of width 256 and 512 for all ten
classes, zipped into either shape. `depths`: patch transformers of four and six blocks. Statistics of BatchNorm are
computed anew for every network that is made. Training takes about seven minutes.

`--json` replaces the parts that were measured and keeps the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.alignment_training import Task, ViT, _initialise, fit, images
from benchmarks.records import record
from benchmarks.zoo.cards import default_cache
from benchmarks.zoo.drift import drift
from benchmarks.zoo.images import Split, load_images
from benchmarks.zoo.vision import Schedule, train_epoch
from merganser.align import match_to_reference, repair, reset_batch_norm, stretch, symmetry
from merganser.align import zip as zip_models
from merganser.align.multi_head import MultiHead, tail_tensors
from merganser.align.state import average

Rows = list[dict[str, Any]]
#: The classes of both halves.
CLASSES = (torch.arange(0, 5), torch.arange(5, 10))
CIFAR_SCHEDULE = Schedule(6, rate=6e-3, optimiser="adamw", batch=128, decay=0.2, precision="bfloat16")


def cnn(classes: int = 5, inputs: int = 1) -> nn.Sequential:
    """Four convolutions with BatchNorm, pooled."""

    def stage(into: int, out: int, pool: bool) -> list[nn.Module]:
        layers: list[nn.Module] = [nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        return [*layers, nn.MaxPool2d(2)] if pool else layers

    body = [*stage(inputs, 24, True), *stage(24, 48, True), *stage(48, 64, False), *stage(64, 64, False)]
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


def standard_error(values: Tensor) -> float:
    return float(values.std() / len(values) ** 0.5)


def fashion_halves(data: Path, seed: int, cache: Path | None) -> Rows:
    """Two small CNNs with five classes of Fashion-MNIST each."""
    tasks = [half(images(data), own) for own in CLASSES]
    return halves([trained(f"cnn{i}", cnn, own, 700, seed + i, cache) for i, own in enumerate(tasks)], tasks)


def cifar_halves(data: Path, seed: int, cache: Path | None) -> Rows:
    """Two small CNNs with five classes of CIFAR-10 each."""
    splits = load_images("cifar10", data, cache or default_cache())
    networks, tasks, cosines = [], [], []
    for i, own in enumerate(CLASSES):
        train, test = (
            replace(split, images=split.images[kept], labels=split.labels[kept] - own[0])
            for split in splits
            for kept in [torch.isin(split.labels, own)]
        )
        network, cosine = trained_on_split(f"cifar{i}", train, seed + i, cache)
        networks.append(network)
        cosines.append(cosine)
        some = train.head(1100)
        tasks.append(Task(some.normalise(some.images), some.labels, test.normalise(test.images), test.labels))
        right = accuracy(outputs(network, tasks[i].test_inputs), test.labels)
        print(f"cifar{i}: {right:.4f} on its own classes, cosine with the start {cosine:.2f}", flush=True)
    ensemble, *others = halves(networks, tasks)
    return [{**ensemble, "cosines": cosines}, *others]


def trained_on_split(name: str, split: Split, seed: int, cache: Path | None) -> tuple[nn.Module, float]:
    """A small CNN, trained like the zoo's or from the cache, and the median cosine of its layers with their start."""
    torch.manual_seed(seed)
    initial = cnn(inputs=3)
    network = deepcopy(initial).to(memory_format=torch.channels_last)
    path = cache / f"zip-{name}-{seed}-{CIFAR_SCHEDULE.epochs}.pt" if cache else None
    if path and path.exists():
        network.load_state_dict(torch.load(path))
    else:
        optimiser = CIFAR_SCHEDULE.build_optimiser(network)
        for epoch in range(CIFAR_SCHEDULE.epochs):
            loss = train_epoch(network, optimiser, split, CIFAR_SCHEDULE, epoch, seed)
            print(f"{name} epoch {epoch + 1}: loss {loss:.3f}", flush=True)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(network.state_dict(), path)
    return network.to(memory_format=torch.contiguous_format).eval(), drift(initial, network)["median_cosine"]


def halves(networks: Sequence[nn.Module], tasks: Sequence[Task]) -> Rows:
    """Join two CNNs with five classes each as one network with two heads."""
    both = [torch.cat([x, y]) for (x, _), (y, _) in islice(zip(*(t.batches(64, 99) for t in tasks), strict=True), 16)]
    inputs = torch.cat([own.test_inputs for own in tasks])
    labels = torch.cat([own.test_targets + 5 * i for i, own in enumerate(tasks)])
    rows: Rows = []
    right: dict[tuple[str, str], Tensor] = {}

    def add(method: str, until: str, heads: Sequence[Tensor], network: nn.Module | None = None) -> None:
        joined = torch.cat([head.log_softmax(1) for head in heads], dim=1)
        right[method, until] = hits = (joined.argmax(1) == labels).double()
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
                "joint": float(hits.mean()),
                "error": standard_error(hits),
                "own": sum(own) / 2,
                "weights": size,
            }
        )
        if method == "zip":
            ahead = hits - right["permutations", until]
            rows[-1] |= {"ahead": float(ahead.mean()), "ahead_error": standard_error(ahead)}

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


def widths(data: Path, seed: int, cache: Path | None) -> Rows:
    """MLPs of two widths, as one of either."""
    task = images(data)
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


def depths(data: Path, seed: int, cache: Path | None) -> Rows:
    """Patch transformers of four and six blocks, as one of six."""
    task = images(data)

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


PARTS = {"halves": fashion_halves, "cifar10_halves": cifar_halves, "widths": widths, "depths": depths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    earlier = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    results: dict[str, Rows] = earlier.get("results", {})
    for part in given.parts:
        results[part] = PARTS[part](given.data, given.seed, given.cache)
        print(part)
        for row in results[part]:
            print("  ", "  ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
    record(given.json, results, [given.seed], added=True)


if __name__ == "__main__":
    main()
