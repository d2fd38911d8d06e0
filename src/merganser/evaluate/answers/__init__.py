"""Judging replies: what a model answered, and whether it is the right answer by value.

Start at `judging.py`; `marks.py` finds the part of a reply that is its answer, `numbers.py` and `choices.py` read it.
"""
