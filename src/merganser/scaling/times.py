"""The time of a merge, predicted from the constants of a machine.

A merge is a pipeline: while one tensor is computed, the inputs of the next are read and the outputs of the last are
written. Its time is that of the slowest stage,

    t = start-up + max(C / (m·c),  L,  (R + W) / (m·d),  Q·ℓ / (m·p)),

with C the processor seconds of all tensors, m machines of c cores and d disks, L the processor seconds of the largest
tensor that one core computes alone, R and W the seconds that one disk takes to read and write (R is 0 for files in
memory), Q requests of latency ℓ, of which p are under way at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from merganser.checkpoints.remote.files import PARALLEL
from merganser.checkpoints.remote.read_ahead import CHUNK
from merganser.errors import InputError

if TYPE_CHECKING:
    from merganser.engine.merge import Merge

#: Rows of a Gram matrix that cost as much as what is done with one of n columns, in units of n.
EIGENVECTORS = 16


@dataclass(frozen=True)
class Machine:
    """The constants of a machine, from `merganser.scaling.constants.measure`; rates are per second.

    Attributes:
        cores: Processors that a program may use.
        start_up: Processor seconds before the first tensor: Python, the plan, the journal.
        per_tensor: Processor seconds that a tensor costs besides its bytes.
        write: Bytes written and synced by one thread.
        read: Bytes read by one thread of a file that is not in memory.
        read_cached: Bytes read by one thread of a file that is.
        read_cached_all: The same, by one thread on each core.
        latency: Seconds until a small read of a file that is not in memory.
        elementwise: Bytes read and written in a processor second by rules that see an entry at a time (linear).
        reduce_map: The same for rules that take a first pass over a tensor (ties).
        whole: `decomposition_cost` in a processor second by rules that decompose matrices (tsv).
    """

    cores: int
    start_up: float
    per_tensor: float
    write: float
    read: float
    read_cached: float
    read_cached_all: float
    latency: float
    elementwise: float
    reduce_map: float
    whole: float


@dataclass(frozen=True)
class Work:
    """The amount of work of a merge, independent of the machine.

    Attributes:
        bytes_in: Bytes to read.
        bytes_out: Bytes to write.
        tensors: The number of outputs.
        amounts: Bytes read and written by kind of rule; for `whole` the sum of `decomposition_cost`.
        largest: `decomposition_cost` of the largest matrix, which one core computes alone.
    """

    bytes_in: int
    bytes_out: int
    tensors: int
    amounts: Mapping[str, float] = field(default_factory=dict)
    largest: float = 0.0

    def processor_seconds(self, machine: Machine) -> float:
        """Return the time of one core of `machine`, without start-up and without waiting for disks."""
        rates = {"elementwise": machine.elementwise, "reduce_map": machine.reduce_map, "whole": machine.whole}
        return self.tensors * machine.per_tensor + sum(n / rates[kind] for kind, n in self.amounts.items())


@dataclass(frozen=True)
class Resources:
    """The resources of a merge: machines with cores and disks. `cached` means that the inputs are in memory."""

    cores: int
    disks: int = 1
    machines: int = 1
    cached: bool = False

    def __post_init__(self) -> None:
        if min(self.cores, self.disks, self.machines) < 1:
            raise InputError("cores, disks and machines must be at least 1")


@dataclass(frozen=True)
class TimeEstimate:
    """The predicted seconds, the seconds of every stage, and the stage that sets the pace."""

    seconds: float
    stages: Mapping[str, float]

    @property
    def limit(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])


def describe_work(merge: Merge) -> Work:
    """Return the work of a merge, from its plan.

    Args:
        merge: The prepared merge; no weights are read.

    Returns:
        Its bytes, its tensors and its arithmetic by kind.
    """
    found = []
    for output in merge.plan.outputs:
        reads = output.reads
        read = sum(merge.sources[source.model].spec(source.name).nbytes for source in reads)
        rule = merge.rule(output)
        kind = "elementwise" if rule.copies else rule.method.reach
        found.append((output.spec.shape, read, output.spec.nbytes, len(output.inputs), kind))
    return _add_up(found)


def merge_of(shapes: Mapping[str, tuple[int, ...]], models: int, kind: str, itemsize: int = 2) -> Work:
    """Return the work of merging `models` checkpoints of these shapes with their base.

    Args:
        shapes: The tensors of a checkpoint.
        models: How many models are merged besides the base.
        kind: What the rule must see: elementwise, reduce_map or whole.
        itemsize: Bytes of an entry.

    Returns:
        The work.

    Example:
        >>> work = merge_of({"w": (1000, 1000)}, models=2, kind="elementwise")
        >>> work.bytes_in, work.bytes_out
        (6000000, 2000000)
    """
    sizes = {name: itemsize * math.prod(shape) for name, shape in shapes.items()}
    return _add_up([(shapes[name], (models + 1) * size, size, models, kind) for name, size in sizes.items()])


def decomposition_cost(shape: tuple[int, ...], models: int) -> float:
    """Return the cost of decomposing the matrices of T models: (d + 16n)·n²·T for d × n with n ≤ d.

    d·n² is a Gram matrix; its eigenvectors and making those of all models orthogonal cost as much as 16n more rows
    (17 in TSV-Merge of eight matrices, between 1024 × 1024 and 4096 × 1024).

    Args:
        shape: The shape of the matrices.
        models: How many there are.

    Returns:
        The cost, in multiplications of a Gram matrix.

    Example:
        >>> decomposition_cost((30, 10), models=2)
        38000.0
    """
    n = min(shape)
    return float((max(shape) + EIGENVECTORS * n) * n**2 * models)


def _add_up(tensors: Sequence[tuple[tuple[int, ...], int, int, int, str]]) -> Work:
    """Sum over tensors given as shape, bytes read, bytes written, models, kind of rule."""
    amounts: dict[str, float] = {}
    largest = 0.0
    for shape, read, written, models, kind in tensors:
        if kind == "whole" and len(shape) == 2 and min(shape) > 1:
            amount = decomposition_cost(shape, models)
            largest = max(largest, amount)
        else:
            kind, amount = "elementwise" if kind == "whole" else kind, float(read + written)
        amounts[kind] = amounts.get(kind, 0.0) + amount
    return Work(sum(t[1] for t in tensors), sum(t[2] for t in tensors), len(tensors), amounts, largest)


def predict(work: Work, machine: Machine, resources: Resources) -> TimeEstimate:
    """Return how long a merge takes with other cores, disks and machines, as the docstring of this module says.

    Args:
        work: What is to be done.
        machine: The constants of one core and one disk.
        resources: How many there are of them.

    Returns:
        The seconds and those of every stage.

    Raises:
        InputError: Fewer than one core, disk or machine.

    Example:
        >>> machine = Machine(2, 1.0, 0.0, 1e9, 2e9, 5e9, 9e9, 1e-4, 1e9, 5e8, 1e10)
        >>> predict(merge_of({"w": (10**5, 10**4)}, 2, "elementwise"), machine, Resources(cores=4, cached=True)).seconds
        3.0
    """
    disks = resources.machines * resources.disks
    reading = 0.0 if resources.cached else work.bytes_in / machine.read
    requests = 0.0 if resources.cached else work.bytes_in / CHUNK + work.tensors
    stages = {
        "processors": work.processor_seconds(machine) / (resources.machines * resources.cores),
        "largest tensor": work.largest / machine.whole,
        "disks": (reading + work.bytes_out / machine.write) / disks,
        "latency": requests * machine.latency / (resources.machines * PARALLEL),
    }
    return TimeEstimate(machine.start_up + max(stages.values()), stages)
