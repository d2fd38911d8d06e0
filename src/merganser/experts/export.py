"""Experts and their merges to ordinary checkpoint directories."""

from merganser.engine.export import write_checkpoint

__all__ = ["write_checkpoint"]
