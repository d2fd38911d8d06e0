"""Decide whether an objective is maximised or minimised, from its measures."""

from __future__ import annotations

from collections.abc import Mapping

from merganser.errors import InputError


def choose_direction(
    name: str, weights: Mapping[str, float], stated: bool | None, directions: Mapping[str, str]
) -> bool:
    """Return whether to maximise Σ weight · measure; refuse an objective that would reward worse models.

    A measure that is better when higher and has a positive weight should be maximised, and so should one that is better
    when lower and has a negative weight.

    Args:
        name: The objective's name, for messages.
        weights: The weight of each measure.
        stated: The user's choice, or None.
        directions: "higher" or "lower" for the measures that have a direction.

    Returns:
        True to maximise, also if neither the user nor a measure gives a direction.

    Raises:
        InputError: If the measures contradict each other or the user's choice.

    Example:
        >>> choose_direction("p", {"p": 1.0}, None, {"p": "lower"})
        False
    """
    wishes = {m: (directions[m] == "higher") == (w > 0) for m, w in weights.items() if w and m in directions}
    up = next((measure for measure, rise in wishes.items() if rise), None)
    down = next((measure for measure, rise in wishes.items() if not rise), None)
    if up is not None and down is not None:
        raise InputError(
            f"objective {name!r}: with these weights a better {up!r} raises it and a better {down!r} lowers it; give "
            f"one of them a weight of the other sign"
        )
    natural = None if up is None and down is None else up is not None
    if stated is not None and natural is not None and stated != natural:
        raise InputError(
            f"objective {name!r}: maximize: {str(stated).lower()} would look for the worst {up or down!r}, whose "
            f"{directions[up or down or '']} values are better; leave it out"
        )
    return natural if stated is None and natural is not None else stated is not False
