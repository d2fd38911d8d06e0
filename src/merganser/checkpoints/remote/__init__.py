"""Checkpoints that are elsewhere: headers and weights read by ranges, nothing kept on disk. Start at `models.py`."""
