"""A file of answers of the endpoints, shared between studies.

An answer is identified by every byte of the weights, by the question and by how it was asked. A study with the same
endpoint and question as an earlier one does not ask again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from merganser.errors import InputError
from merganser.evaluate.fingerprints import FORMAT, hash_asking, hash_question, hash_tokenizer, hash_value
from merganser.evaluate.questions import Asked
from merganser.strict_json import parse_json


class AnswerCache:
    """Answers by key in one SQLite file, which several processes may use at once.

    Args:
        path: The file; created if absent.

    Raises:
        InputError: If the file is not a file of answers.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, measures TEXT NOT NULL)")
                yield connection
        except sqlite3.Error as error:
            raise InputError(f"answers: {self.path} is not a file of answers, or not writable: {error}") from error

    def ask(
        self,
        keys: Sequence[str],
        items: Sequence[int],
        examine: Callable[[Sequence[int]], Mapping[str, Sequence[float]]],
    ) -> dict[str, list[float]]:
        """Return the measures of all items; ask only those whose key is unknown, and store the new ones."""
        with self._connect() as connection:
            rows = [connection.execute("SELECT measures FROM answers WHERE key = ?", (key,)).fetchone() for key in keys]
        known: list[Any] = [None if row is None else parse_json(row[0]) for row in rows]
        missing = [place for place, found in enumerate(known) if found is None]
        if missing:
            fresh = examine([items[place] for place in missing])
            for number, place in enumerate(missing):
                known[place] = {measure: float(values[number]) for measure, values in fresh.items()}
            with self._connect() as connection:
                connection.executemany(
                    "REPLACE INTO answers VALUES (?, ?)", [(keys[place], json.dumps(known[place])) for place in missing]
                )
        return {measure: [found[measure] for found in known] for measure in known[0]} if known else {}


def answer_keys(examiner: Asked, weights: str, items: Sequence[int]) -> list[str]:
    """Return a key for each item: a hash of the weights' hash, of how the examiner asks, and of the question.

    Args:
        examiner: The examiner; the location of its questions and the batch size do not count.
        weights: The identity of the model's weights.
        items: Numbers of its questions.
    """
    how = [FORMAT, weights, hash_asking(examiner), hash_tokenizer(examiner.tokenizer)]
    return [hash_value([*how, hash_question(examiner, item)]) for item in items]
