"""The budget of a race: questions, seconds, or both."""

from __future__ import annotations

from dataclasses import dataclass

from merganser.errors import InputError
from merganser.units import parse_time


@dataclass(frozen=True)
class Budget:
    """Limits of a race; None means no limit.

    Attributes:
        questions: Questions asked of all contenders together.
        seconds: Time for merging and asking, including time before an interruption.
    """

    questions: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, given: str | int | None) -> Budget:
        """Parse limits: `5000` questions, `10m` of time, or `5000,10m`.

        Raises:
            InputError: If a limit is neither, is not above 0, or is given twice.
        """
        found: dict[str, float] = {}
        for each in [] if given is None else str(given).split(","):
            text = each.strip()
            kind, value = ("questions", int(text)) if text.isdecimal() else ("seconds", parse_time(text))
            if kind in found:
                raise InputError(f"the budget has two numbers of {kind}; give one")
            if not value > 0:
                raise InputError(f"a budget of {text} {kind} is empty; give more than 0")
            found[kind] = value
        questions = found.get("questions")
        return cls(None if questions is None else int(questions), found.get("seconds"))


@dataclass
class Meter:
    """The budget spent so far, and whether more is allowed.

    Attributes:
        budget: The limits.
        asked: Questions so far.
        seconds: Time so far.
        merging: The part of the time spent in methods, which does not grow with the questions.
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

    def questions_left(self, reserved: int = 0, runs: int = 0) -> float:
        """Return how many more questions the budget allows at the speed so far, minus `reserved`.

        Time is also reserved for some `runs` of the slowest method, such as those of the check.
        """
        left = float("inf")
        if self.budget.questions is not None:
            left = self.budget.questions - self.asked
        if self.budget.seconds is not None and self.asked:
            speed = self.asked / max(self.seconds - self.merging, 1e-9)
            left = min(left, (self.budget.seconds - self.seconds - runs * self.longest) * speed)
        return left - reserved
