"""Scoring: is a merged model sound, how well does it do, and how much of its parents' skill is left."""
