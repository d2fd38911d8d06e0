"""The troubleshooting page quotes messages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: The first column of the tables: what messages say.
QUOTED = [
    phrase
    for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    for phrase in re.findall(r"`([^`]+)`", row)
    if phrase != "the message says"
]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) > 12


@pytest.mark.parametrize("phrase", QUOTED)
def test_the_message_exists(phrase: str) -> None:
    assert phrase in SOURCE
