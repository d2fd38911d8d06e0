"""A world without models: answers follow an IRT whose abilities mix the endpoints' linearly. Picklable for workers."""

from __future__ import annotations

import os
import signal
import time
import zlib
from dataclasses import dataclass

import numpy as np

from merganser.evolve.space import key

ITEMS = 200


def item_parameters(task):
    rng = np.random.default_rng(zlib.crc32(task.encode()))
    return rng.lognormal(-0.3, 0.4, size=(ITEMS, 2)), rng.normal(size=ITEMS), rng.random(ITEMS)


@dataclass(frozen=True)
class World:
    """`fail_above`: candidates whose first weight exceeds it raise; `die_once`: a file whose absence kills a worker."""

    fail_above: float = 9.0
    die_once: str | None = None
    slow: float = 0.0
    log: str | None = None

    def __call__(self, candidate, items):
        if isinstance(candidate, str):
            ability = {"math": np.array([1.5, -0.5]), "code": np.array([-0.5, 1.5])}[candidate]
            name = candidate
        else:
            a, b = candidate["weight.math"], candidate["weight.code"]
            if a > self.fail_above:
                raise ValueError("this merge answers nonsense")
            if self.die_once and not os.path.exists(self.die_once):
                open(self.die_once, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            ability = a * np.array([1.5, -0.5]) + b * np.array([-0.5, 1.5]) - 0.1 * (a * a + b * b)
            name = key(candidate)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{name}\n")
        time.sleep(self.slow)
        answers = {}
        for task, chosen in items.items():
            disc, diff, noise = item_parameters(task)
            p = 1 / (1 + np.exp(diff[chosen] - disc[chosen] @ ability))
            answers[task] = (noise[chosen] < p).astype(float).tolist()
            answers[f"{task}.length"] = (10 + 5 * p).tolist()
        return answers


class Deadly(World):
    """Kills its process for some candidates."""

    def __call__(self, candidate, items):
        if candidate["weight.math"] > 1.3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(candidate, items)
