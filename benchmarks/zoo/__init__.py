"""Real models trained on the user's machine, cached, and described by a card each; the benchmarks merge these."""
