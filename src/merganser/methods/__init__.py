"""Merging rules, one family a file. Importing this package registers them all."""

from merganser.methods import averages, spherical, task_vectors

__all__ = ["averages", "spherical", "task_vectors"]
