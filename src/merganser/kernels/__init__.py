"""Numerics on bare tensors. Nothing here knows of models, names or files."""
