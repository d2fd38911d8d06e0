"""Find where the experts of one base interfere, and what to do about it.

Start with `survey`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "records": ("Survey",),
        "surveys": ("survey",),
    },
)

if TYPE_CHECKING:
    from merganser.interference.records import Survey as Survey
    from merganser.interference.surveys import survey as survey
