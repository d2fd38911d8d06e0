"""Trace a module and learn from its operations which axes of its weights move together.

`graph` interprets the exported program; `rules` define the effect of each operation on axes; `dims` is their
union-find; `coverage` pins what the examples left out; `nesting` decides which permutations may depend on an index;
`emission` turns the result into a `Symmetry`.
"""
