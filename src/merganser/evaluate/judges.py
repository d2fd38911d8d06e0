"""Replies judged by another model behind a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from merganser.errors import InputError, MerganserError
from merganser.evaluate.answers.marks import cut
from merganser.evaluate.endpoints import Server
from merganser.evaluate.generation import Generation
from merganser.evaluate.prompts import check_prompt
from merganser.evaluate.records import Placed

_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Judged(Generation):
    """`question` and `answer`: right if the `judge`, a model at `http://host:port/v1#model`, says yes.

    `instruction` is its prompt, with the fields of the record and `reply` in braces; its verdict is the last yes or no
    that it writes, and a judgement without one is an error.
    """

    judge: str = ""
    instruction: str = (
        "Question: {question}\nReference answer: {answer}\nReply: {reply}\n\n"
        "Is the reply right? It may be worded differently from the reference. Say only yes or no."
    )

    def validate(self, placed: Placed) -> dict[str, Any]:
        if not self.judge:
            raise InputError("kind judged needs a judge: http://host:port/v1#model")
        Server.parse(self.judge)
        check_prompt(self.prompt, placed)
        check_prompt(self.instruction, Placed(placed.place, {**placed.record, "reply": ""}))
        return placed.record

    def is_right(self, reply: str, record: Mapping[str, Any]) -> bool:
        asked = self.instruction.format(**{**record, "reply": reply})
        said = Server.parse(self.judge).chat([[{"role": "user", "content": asked}]], 256)[0]
        verdicts = _VERDICT.findall(cut(said, ()))
        if not verdicts:
            raise MerganserError(f"{self.judge}: the judge said neither yes nor no: {said[:80]!r}")
        return str(verdicts[-1]).lower() == "yes"
