"""What happens to results when the disk fails or the process dies, at every operation and at any time."""
