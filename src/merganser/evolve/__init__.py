"""Evolutionary merging with few evaluations: Extract, Estimate, Evolve (MERGE³)."""
