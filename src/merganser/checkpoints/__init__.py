"""Weights at rest: lazy readers and views behind one `Checkpoint` protocol, opened by `open`."""

from merganser.checkpoints.base import Checkpoint, TensorSpec, View
from merganser.checkpoints.opening import open

__all__ = ["Checkpoint", "TensorSpec", "View", "open"]
