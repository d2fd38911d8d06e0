"""How long a merge will take elsewhere: constants of a machine, measured, and a model of time. Start at `times.py`."""
