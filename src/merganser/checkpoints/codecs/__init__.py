"""Decode quantised weights: one codec per stored format, and a table of formats (`formats`)."""
