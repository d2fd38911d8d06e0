"""Remote checkpoints: headers and weights are read by ranges, and nothing is kept on disk. Start at `models.py`."""
