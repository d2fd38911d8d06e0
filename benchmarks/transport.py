"""A fine-tune moved to another base: accuracy on the new task and on the old one, by the way the bases are matched.

    python -m benchmarks.transport [--networks mlp cnn vit text] [--seeds 0 1 2] [--cache DIR] [--data DIR] [--json F]

Images: classifiers of Fashion-MNIST (MLPs and CNNs of the zoo, small patch transformers) are fine-tuned on the garments
turned by a quarter, and what they learned is moved to another base: one from another seed, or the same one trained on
for a while. Text: MiniLM experts (mr, subj, trec) are moved to an encoder that was trained on for another task
(clinc150), as it is and with its units in another order.

Every way may choose its scale among a few by validation data of the new task. "mask" keeps the entries whose sign
agrees with a descent step on four labelled batches; what training on these batches alone gives stands beside it, and
fine-tuning the new base on all of the data is the ceiling. Standard errors are over pairs of bases, or over tasks.
Rows of networks that are not measured stay in the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.alignment_training import Task, images
from benchmarks.alignment_training import train as train_transformer
from benchmarks.records import record
from benchmarks.zoo.cards import add_locations
from benchmarks.zoo.text import expert_directory, load_head
from benchmarks.zoo.text_layers import TopLayers, with_states
from benchmarks.zoo.text_tasks import Sentences, load_encoder, load_task, pool
from benchmarks.zoo.vision import load_model
from merganser.align import Symmetry, match, scramble, symmetry, transport
from merganser.align.permutations import Permutations, identity
from merganser.align.transports import match_bases

SCALES = (0.25, 0.5, 0.75, 1.0, 1.5)
#: Steps and rate of fine-tuning images.
TUNING = {"mlp": (300, 3e-4), "cnn": (200, 1e-3), "vit": (200, 1e-3)}
NETWORKS = (*TUNING, "text")
#: Sentences, in a fixed shuffle, that a text encoder is scored on.
SCORED = 200
TEXT_TASKS, OTHER = ("mr", "subj", "trec"), "clinc150"
Batch = tuple[Any, Tensor]
Score = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Case:
    """A fine-tune of `source` to be moved to `target`, which `native` and `taught` were fine-tuned from: on all of the
    data, and on the few batches.
    """

    network: str
    release: str
    source: nn.Module
    tuned: nn.Module
    target: nn.Module
    native: nn.Module
    taught: nn.Module
    few: Sequence[Batch]
    validation: Score
    new: Score
    old: Score


def fine_tune(network: nn.Module, batches: Iterable[Batch], rate: float) -> nn.Module:
    """Return a copy after AdamW on the batches, the rate falling to zero."""
    tuned = deepcopy(network)
    todo = list(batches)
    optimiser = torch.optim.AdamW(tuned.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, len(todo))
    for inputs, labels in todo:
        optimiser.zero_grad()
        cross_entropy(_run(tuned, inputs), labels).backward()
        optimiser.step()
        schedule.step()
    return tuned


def _run(network: nn.Module, inputs: Any) -> Tensor:
    logits: Tensor = network(**inputs) if isinstance(inputs, Mapping) else network(inputs)
    return logits


@torch.no_grad()
def accuracy(network: nn.Module, batches: Sequence[Batch]) -> float:
    right = [(_run(network, inputs).argmax(1) == labels).float() for inputs, labels in batches]
    return float(torch.cat(right).mean())


def image_cases(network: str, seeds: Sequence[int], data: Path, cache: Path) -> Iterator[Case]:
    """Fashion-MNIST turned by a quarter as the new task, upright as the old one."""
    upright = images(data)
    shape = (-1, 1, 28, 28) if network == "cnn" else (-1, 784)
    steps, rate = TUNING[network]

    def turned(pixels: Tensor) -> Tensor:
        return pixels.reshape(-1, 28, 28).rot90(1, (1, 2)).reshape(-1, 784)

    new = Task(turned(upright.inputs), upright.targets, turned(upright.test_inputs), upright.test_targets)

    def batches(task: Task, seed: int, count: int) -> list[Batch]:
        # The last 5,000 training images are for validation.
        part = Task(task.inputs[:-5000], task.targets[:-5000], task.test_inputs, task.test_targets)
        return [(x.reshape(shape), y) for x, y in islice(part.batches(64, seed), count)]

    def held(inputs: Tensor, targets: Tensor, count: int) -> Score:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[:count]
        pairs = zip(inputs[order].reshape(shape).split(500), targets[order].split(500), strict=True)
        kept = list(pairs)
        return lambda model: accuracy(model, kept)

    validation = held(new.inputs[-5000:], new.targets[-5000:], 500)
    scores = [held(task.test_inputs, task.test_targets, 2000) for task in (new, upright)]
    few = batches(new, 77, 4)
    bases = {seed: _base(network, seed, upright, cache) for seed in seeds}
    tuned = {seed: fine_tune(base, batches(new, seed, steps), rate) for seed, base in bases.items()}
    taught = {seed: fine_tune(base, few * 10, rate) for seed, base in bases.items()}
    common = (few, validation, *scores)
    for a, b in permutations(seeds, 2):
        yield Case(network, "another seed", bases[a], tuned[a], bases[b], tuned[b], taught[b], *common)
    for seed, base in bases.items():
        later = fine_tune(base, batches(upright, 100 + seed, 2 * steps), rate)
        native = fine_tune(later, batches(new, seed, steps), rate)
        again = fine_tune(later, few * 10, rate)
        yield Case(network, "trained on", base, tuned[seed], later, native, again, *common)


def _base(network: str, seed: int, task: Task, cache: Path) -> nn.Module:
    if network == "vit":
        return train_transformer("vit", seed, task, cache / "transport")[1]
    return load_model(network, "fashion_mnist", seed, cache)


class Classifier(nn.Module):
    """The trained layers of an encoder, the mean over tokens and a head."""

    def __init__(self, layers: nn.Module, head: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layers = layers
        self.head = nn.Linear(*reversed(head["weight"].shape))
        self.head.load_state_dict(dict(head))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.head(pool(self.layers, {"hidden": hidden, "attention_mask": attention_mask}))
        return logits


def text_cases(data: Path, cache: Path) -> Iterator[Case]:
    """Experts of sentences, moved to an encoder that was trained for another task."""

    def layers(name: str) -> nn.Module:
        return TopLayers(load_encoder(expert_directory(cache, name) if name else None)).eval()

    def batches(sentences: Sentences, epochs: int = 0) -> list[Batch]:
        generator = torch.Generator().manual_seed(0)
        rounds = [sentences.batches(16, generator) for _ in range(epochs)] or [sentences.batches(64)]
        return [(sentences.padded(chosen), sentences.labels[chosen]) for each in rounds for chosen in each]

    other_head = load_head(OTHER, 0, cache)
    other = batches(with_states(load_task(OTHER, data, cache).test.slice(0, SCORED)))
    for name in TEXT_TASKS:
        task, head = load_task(name, data, cache), load_head(name, 0, cache)
        scored = (part.slice(0, SCORED) for part in (task.validation, task.test))
        train, validation, test = (with_states(part) for part in (task.train.within(20_000), *scored))
        source, tuned, target = (Classifier(layers(own), head).eval() for own in ("", name, OTHER))
        torch.manual_seed(0)
        fresh = {"weight": 0.02 * torch.randn(head["weight"].shape), "bias": torch.zeros(len(head["bias"]))}
        few = batches(train.slice(0, 256))
        native = fine_tune(Classifier(deepcopy(target.layers), fresh), batches(train, 2), 3e-4)
        taught = fine_tune(target, few * 10, 3e-4)
        known, held = batches(validation), batches(test)

        def old(model: nn.Module) -> float:
            assert isinstance(model, Classifier)
            return accuracy(Classifier(model.layers, other_head), other)

        free = symmetry(target, few[0][0])
        shuffled = scramble(target, free, seed=1)
        for release, base in (("trained on", target), ("trained on, in another order", shuffled)):
            yield Case(
                "text",
                release,
                source,
                tuned,
                base,
                native,
                taught,
                few,
                lambda model, known=known: accuracy(model, known),
                lambda model, held=held: accuracy(model, held),
                old,
            )


def measure(case: Case, known: dict[str, Symmetry]) -> Iterator[dict[str, Any]]:
    """Accuracies by way of matching, with and without the mask, at scale 1 and at the scale that validation chooses.

    `known` are the symmetries of the architecture by their kind.
    """
    inputs = [batch for batch, _ in case.few]
    shell = deepcopy(case.target)

    def load(state: Mapping[str, Tensor]) -> nn.Module:
        shell.load_state_dict(state)
        return shell

    def row(way: str, mask: bool, chosen: bool | None, model: nn.Module, **more: Any) -> dict[str, Any]:
        head = {"network": case.network, "release": case.release, "way": way, "mask": mask, "chosen": chosen}
        return head | more | {"new": case.new(model), "old": case.old(model)}

    def moved(group: Symmetry, maps: Permutations) -> Iterator[dict[str, Any]]:
        for mask in (False, True):
            few = case.few if mask else None
            for chosen in (False, True):
                tried: list[tuple[float, float]] = []
                scales = iter(SCALES)

                def score(state: Mapping[str, Tensor], tried: Any = tried, scales: Any = scales) -> float:
                    tried.append((case.validation(load(state)), next(scales)))
                    return tried[-1][0]

                state = transport(
                    case.tuned,
                    case.source,
                    case.target,
                    group,
                    alignment=maps,
                    gradient_batches=few,
                    scale=SCALES if chosen else 1.0,
                    score=score if chosen else None,
                )
                scale = max(tried, key=lambda pair: pair[0])[1] if chosen else 1.0
                yield row("", mask, chosen, load(state), scale=scale)

    yield row("the new base as it is", False, None, case.target)
    free = known["permutation"]
    ways = {"not matched": (free, identity(free))}
    ways["permutations"] = (free, match_bases(case.target, case.source, free).permutations)
    found = match(case.target, case.source, free, "activations", batches=inputs, standardize=True)
    ways["permutations by activations"] = (free, found.permutations)
    if wide := known.get("orthogonal"):
        ways["orthogonal maps"] = (wide, match_bases(case.target, case.source, wide).permutations)
    done: list[tuple[Symmetry, Permutations, list[dict[str, Any]]]] = []
    for way, (group, maps) in ways.items():
        rows = next((rows for own, known_maps, rows in done if own is group and _equal(known_maps, maps)), None)
        rows = rows or list(moved(group, maps))
        done.append((group, maps, rows))
        yield from ({**found, "way": way} for found in rows)
    yield row("trained on the four batches", False, None, case.taught)
    yield row("fine-tuned anew", False, None, case.native)
    yield row("the fine-tune on its own base", False, None, case.tuned)


def _equal(one: Permutations, other: Permutations) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def symmetries(case: Case) -> dict[str, Symmetry]:
    """The symmetry of an architecture, and the wider one of transformers."""
    inputs, _ = case.few[0]
    example = {k: v[:2] for k, v in inputs.items()} if isinstance(inputs, Mapping) else inputs[:2]
    kinds = ("permutation", "orthogonal") if case.network in ("vit", "text") else ("permutation",)
    return {kind: symmetry(case.target, example, kind=kind) for kind in kinds}


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Means over cases with their standard errors, in the order of the first case."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("network", "release", "way", "mask", "chosen")), []).append(row)
    found = []
    for (network, release, way, mask, chosen), own in groups.items():
        line = {"network": network, "release": release, "way": way, "mask": mask, "chosen": chosen, "cases": len(own)}
        for key in ("new", "old", "scale"):
            values = [row[key] for row in own if key in row]
            if values:
                line[key] = fmean(values)
                line[f"{key}_error"] = stdev(values) / np.sqrt(len(values)) if len(values) > 1 else None
        found.append(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--json", type=Path)
    add_locations(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    before = json.loads(given.json.read_text())["results"]["rows"] if given.json and given.json.exists() else []
    kept = [row for row in before if row["network"] not in given.networks]
    for network in given.networks:
        text, known = network == "text", dict[str, Symmetry]()
        for case in (
            text_cases(given.data, given.cache) if text else image_cases(network, given.seeds, given.data, given.cache)
        ):
            known = known or symmetries(case)
            for row in measure(case, known):
                rows.append(row)
                marks = f"{'mask' if row['mask'] else '':5}{'chosen' if row['chosen'] else '':7}"
                print(
                    f"{network:5}{case.release:14}{row['way']:30}{marks}{row['new']:.4f} {row['old']:.4f}", flush=True
                )
            found = sorted([*kept, *summarise(rows)], key=lambda row: NETWORKS.index(row["network"]))
            record(given.json, {"rows": found}, given.seeds, added=bool(kept))


if __name__ == "__main__":
    main()
