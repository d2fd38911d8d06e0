"""Judge replies: find the answer of a model and compare it with the reference by value.

Start at `judging.py`; `marks.py` finds the part of a reply that is its answer, `numbers.py` and `choices.py` read it.
"""
