"""Numerics on bare tensors, independent of models, names and files."""
