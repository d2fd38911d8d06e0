"""From a module to what its operations say about the axes of its weights.

`graph` walks the exported program; `rules` say what each operation does to axes; `dims` is the union-find they write
to; `coverage` pins what the examples left out; `nesting` decides which permutations may depend on an index; `emission`
turns the result into a `Symmetry`.
"""
