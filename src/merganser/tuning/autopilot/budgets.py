"""What a race may cost: questions, seconds, or both."""

from __future__ import annotations

from dataclasses import dataclass

from merganser.errors import InputError
from merganser.units import parse_time


@dataclass(frozen=True)
class Budget:
    """Limits of a race; None is no limit.

    Attributes:
        questions: Questions asked of all contenders together.
        seconds: Time spent on merging and asking, also before an interruption.
    """

    questions: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, given: str | int | None) -> Budget:
        """Read limits as they are written: `5000` questions, `10m` of time, or `5000,10m`.

        Raises:
            InputError: A limit is neither, is not above 0, or is given twice.
        """
        found: dict[str, float] = {}
        for each in [] if given is None else str(given).split(","):
            text = each.strip()
            kind, value = ("questions", int(text)) if text.isdecimal() else ("seconds", parse_time(text))
            if kind in found:
                raise InputError(f"the budget has two numbers of {kind}; give one")
            if not value > 0:
                raise InputError(f"a budget of {text} {kind} allows nothing")
            found[kind] = value
        questions = found.get("questions")
        return cls(None if questions is None else int(questions), found.get("seconds"))


@dataclass
class Meter:
    """What was spent so far, and whether more can be afforded.

    Attributes:
        budget: The limits.
        asked: Questions so far.
        seconds: Time so far.
        merging: The part of it in which methods were run, which does not grow with the questions.
        longest: The longest run of a method.
    """

    budget: Budget
    asked: int = 0
    seconds: float = 0.0
    merging: float = 0.0
    longest: float = 0.0

    def add(self, asked: int, seconds: float, merging: float) -> None:
        self.asked += asked
        self.seconds += seconds
        self.merging += merging
        self.longest = max(self.longest, merging)

    def questions_left(self, reserved: int = 0) -> float:
        """Return how many more questions the budget allows at the speed so far; `reserved` are kept back.

        Time is kept back for one more run of the slowest method: the check runs the winner's again.
        """
        left = float("inf")
        if self.budget.questions is not None:
            left = self.budget.questions - self.asked
        if self.budget.seconds is not None and self.asked:
            speed = self.asked / max(self.seconds - self.merging, 1e-9)
            left = min(left, (self.budget.seconds - self.seconds - self.longest) * speed)
        return left - reserved
