"""The autopilot: inspects experts, races ways to merge them on few questions, and may advise against merging.

Start with `pilot.auto`, which is `mg.tuning.auto`; `deciding.py` has the sequence of steps.
"""
