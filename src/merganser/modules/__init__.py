"""Live networks: batches, functional calls, captured activations and moments, evaluation mode.

Start with `batches.py`.
"""
