"""Stored weights: lazy readers and views behind one `Checkpoint` protocol. Start at `open`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, {"base": ("Checkpoint", "TensorSpec", "View"), "opening": ("open",)})

if TYPE_CHECKING:
    from merganser.checkpoints.base import Checkpoint as Checkpoint
    from merganser.checkpoints.base import TensorSpec as TensorSpec
    from merganser.checkpoints.base import View as View
    from merganser.checkpoints.opening import open as open
