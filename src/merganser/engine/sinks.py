"""Where results go: a dict, a live module, or (in `writer`) files on disk."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from merganser.engine.blocks import Piece
from merganser.engine.changes import Change
from merganser.engine.plan import Output, Plan
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


#: Digests of stored tensors: the file they are in -> the name of a tensor -> its digest.
Digests = Mapping[str, Mapping[str, str]]


class Finished(NamedTuple):
    """What is known of an output that was written: the checksum of its bytes (their digest, if there is a lock file),
    what became of it, and the digests of the stored tensors that were first read for it."""

    checksum: str
    change: Change | None = None
    sources: Digests = MappingProxyType({})


class Sink(Protocol):
    """Takes the pieces of every output, in any order, from any thread."""

    def done(self) -> Collection[str]:
        """Outputs that are there already and need not be computed."""
        ...

    def write(self, output: Output, piece: Piece, tensor: Tensor) -> None: ...

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        """Called once, after the last piece of an output, with what became of it if that was to be noted, and the
        digests of the stored tensors that were first read for it if those were."""
        ...


class ReportingSink(Sink, Protocol):
    """What a worker in another process writes to."""

    def report(self) -> Mapping[str, Finished]:
        """The outputs finished since the last report, by name."""
        ...


@runtime_checkable
class SharedSink(Sink, Protocol):
    """A sink that forked workers can write to."""

    def for_worker(self) -> ReportingSink:
        """What a forked worker writes to; called there. Only the parent's sink is told what is finished."""
        ...

    def finished_elsewhere(self, output: Output, finished: Finished) -> None:
        """Called once, after a worker has reported an output."""
        ...


class DictSink:
    """Results in memory, tied names sharing one tensor."""

    def __init__(self, plan: Plan) -> None:
        self.tensors: dict[str, Tensor] = {
            output.name: torch.empty(output.spec.shape, dtype=output.spec.dtype, device="cpu")
            for output in plan.outputs
        }
        self._aliases = plan.aliases

    def done(self) -> Collection[str]:
        return ()

    def write(self, output: Output, piece: Piece, tensor: Tensor) -> None:
        target = self.tensors[output.name].view(-1)
        target[piece.offset : piece.offset + piece.numel].copy_(tensor.reshape(-1))

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        pass

    def result(self) -> dict[str, Tensor]:
        return self.tensors | {alias: self.tensors[name] for alias, name in self._aliases.items()}


class ModuleSink:
    """Results copied straight into the parameters and buffers of a live module."""

    def __init__(self, module: nn.Module) -> None:
        self._targets = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}

    def done(self) -> Collection[str]:
        return ()

    def write(self, output: Output, piece: Piece, tensor: Tensor) -> None:
        target = self._targets[output.name].view(-1)
        target[piece.offset : piece.offset + piece.numel].copy_(tensor.reshape(-1))

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        pass
