"""Stored weights: lazy readers and views behind one `Checkpoint` protocol. Start at `open`."""

from merganser.checkpoints.base import Checkpoint, TensorSpec, View
from merganser.checkpoints.opening import open

__all__ = ["Checkpoint", "TensorSpec", "View", "open"]
