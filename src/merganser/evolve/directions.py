"""Whether an objective is to rise or to fall, from the measures it is made of."""

from __future__ import annotations

from collections.abc import Mapping

from merganser.errors import InputError


def choose_direction(
    name: str, weights: Mapping[str, float], stated: bool | None, directions: Mapping[str, str]
) -> bool:
    """Return whether to maximise Σ weight · measure, refusing what would reward a worse model.

    A measure whose higher values are better, with a positive weight, asks to maximise, and so does one whose lower
    values are better with a negative weight.

    Args:
        name: The objective's name, for messages.
        weights: The weight of each measure.
        stated: What the user said, or None.
        directions: "higher" or "lower" for the measures that have a direction.

    Returns:
        True to maximise; without a statement and without a measure that has a direction, also True.

    Raises:
        InputError: The measures pull in opposite directions, or against what is stated.

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
