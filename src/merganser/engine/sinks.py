"""Destinations of results: a dict, a live module (in `modules`), or files on disk (in `writer`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from merganser.checkpoints.stored_entries import StoredEntries
from merganser.engine.blocks import Piece
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from merganser.engine.changes import Change
    from merganser.engine.plan import Output, Plan


#: Digests of stored tensors: file -> tensor name -> digest.
Digests = Mapping[str, Mapping[str, str]]


class Finished(NamedTuple):
    """The record of a written output: the checksum of its bytes (with a lock file, their digest), its change, and
    the digests of stored tensors that were first read for it.
    """

    checksum: str
    change: Change | None = None
    sources: Digests = MappingProxyType({})


class Sink(Protocol):
    """Receives the pieces of every output, in any order, from any thread."""

    def done(self) -> Collection[str]:
        """Return the outputs that exist already and need not be computed."""
        ...

    def write(self, output: Output, piece: Piece, entries: StoredEntries) -> None: ...

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        """Called once, after the last piece of an output, with its change and the digests of stored tensors first
        read for it, as far as these are recorded.
        """
        ...


class PlacedSink(Sink, Protocol):
    """A sink in memory, whose outputs can be computed where they belong."""

    def place(self, output: Output) -> Tensor:
        """Return the flat tensor of an output, which may have a wider dtype. Blocks computed into it are written
        again (`write`), with themselves.
        """
        ...

    def write(self, output: Output, piece: Piece, entries: StoredEntries) -> None:
        """Copy a piece to its place, unless it was computed there."""
        part = self.place(output)[piece.offset : piece.offset + piece.numel]
        if part.data_ptr() != entries.address:
            part.copy_(entries.tensor())

    def finished(self, output: Output, change: Change | None, sources: Digests) -> None:
        """Do nothing: tensors in memory have no records."""
        return


def place_of(sink: Sink | PlacedSink, output: Output) -> StoredEntries | None:
    """Return the entries of an output in a `PlacedSink`; None for other sinks, and if they are on another device."""
    place = getattr(sink, "place", None)
    flat: Tensor | None = None if place is None else place(output)
    return None if flat is None or flat.device.type != "cpu" or not flat.is_contiguous() else StoredEntries.of(flat)


class ReportingSink(Sink, Protocol):
    """The sink of a worker in another process."""

    def report(self) -> Mapping[str, Finished]:
        """Return the outputs finished since the last report, by name."""
        ...


@runtime_checkable
class SharedSink(Sink, Protocol):
    """A sink that forked workers can write to."""

    def for_worker(self) -> ReportingSink:
        """Return the sink of a forked worker; called there. Only the parent's sink is told what is finished."""
        ...

    def finished_elsewhere(self, output: Output, finished: Finished) -> None:
        """Called once, after a worker has reported an output."""
        ...


class DictSink(PlacedSink):
    """Collects results in memory; tied names share one tensor."""

    def __init__(self, plan: Plan) -> None:
        with torch.inference_mode(False):  # threads, which have no such mode, could not write into its tensors
            self.tensors: dict[str, Tensor] = {
                output.name: torch.empty(output.spec.shape, dtype=output.spec.dtype, device="cpu")
                for output in plan.outputs
            }
        self._aliases = plan.aliases

    def done(self) -> Collection[str]:
        return ()

    def place(self, output: Output) -> Tensor:
        return self.tensors[output.name].view(-1)

    def result(self) -> dict[str, Tensor]:
        return self.tensors | {alias: self.tensors[name] for alias, name in self._aliases.items()}
