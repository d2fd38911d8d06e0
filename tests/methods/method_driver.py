"""A small engine for tests: cuts tensors into blocks of rows and runs a method over them."""

import math
import random
from dataclasses import replace

import numpy as np
import torch

from merganser.methods.base import Group
from merganser.methods.norms import common_gains
from merganser.methods.registry import build, lookup


class RowBlocks:
    """Blocks of `step` rows (or elements of a vector), mapped in a shuffled order to show that order is nothing."""

    def __init__(self, group, step, shuffle=0):
        self.group, self.step, self.shape, self.shuffle = group, step, group.shape, shuffle
        self.name, self.labels, self.prepared = group.name, group.labels, group.prepared

    def __len__(self):
        return max(1, math.ceil(self.shape[0] / self.step)) if self.shape else 1

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = self.group
        if not group.shape:
            return group
        rows = slice(index * self.step, (index + 1) * self.step)
        return Group(
            name=group.name,
            models=tuple(m[rows] for m in group.models),
            base=None if group.base is None else group.base[rows],
            labels=group.labels,
            shape=group.shape,
            offset=index * self.step * math.prod(group.shape[1:]),
            seed=group.seed,
            statistics={k: tuple(s[rows] for s in v) for k, v in group.statistics.items()},
            prepared=group.prepared,
            gains=group.gains,
        )

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def map(self, function, only=None, stride=1):
        if only is not None:
            return [function(self[only])]
        order = list(range(len(self)))
        random.Random(self.shuffle).shuffle(order)
        results = {i: function(self[i]) for i in order}
        return [results[i] for i in range(len(self))]


def make_group(models, base=None, name="layer.weight", seed=0, labels=None, statistics=None, prepared=None):
    def tensor(x):
        return x if isinstance(x, torch.Tensor) else torch.from_numpy(np.asarray(x))

    models = tuple(tensor(m) for m in models)
    return Group(
        name=name,
        models=models,
        base=None if base is None else tensor(base),
        labels=tuple(labels or (f"m{i}" for i in range(len(models)))),
        shape=tuple(models[0].shape),
        seed=seed,
        statistics=statistics or {},
        prepared=prepared,
    )


def run(method, models, base=None, step=None, parameters=None, shuffle=0, **options):
    """The merged tensor; `step` rows a block, all of them by default."""
    group = make_group(models, base, **options)
    rule = build(lookup(method), parameters or {}, group.labels)
    rule.check_inputs(len(models), base is not None)
    step = step or max(1, group.shape[0] if group.shape else 1)
    if rule.equalizes:
        gains = common_gains([RowBlocks(group, step, shuffle)])
        group = replace(group, gains=tuple(gains.get(label, 1.0) for label in group.labels))
    if rule.needs_preparation() and group.prepared is None:
        whole = max(1, group.shape[0] if group.shape else 1) if rule.reach == "whole" else step
        group = replace(group, prepared=rule.prepare([(parameters or {}, RowBlocks(group, whole, shuffle))]))
    if rule.reach == "whole":
        return rule.merge(group)
    blocks = RowBlocks(group, step, shuffle)
    state = rule.reduce(blocks) if rule.reach == "reduce_map" else None
    parts = [rule.merge(block, state) for block in blocks]
    return torch.cat(parts) if group.shape else parts[0]
