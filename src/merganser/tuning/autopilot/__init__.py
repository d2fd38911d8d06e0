"""The autopilot: looks at experts, races ways to merge them on few questions, and may say no.

Start with `pilot.auto`, which is `mg.tuning.auto`; `deciding.py` has the order of things.
"""
