from __future__ import annotations

from support.llamas import llamas, transformers

__all__ = ["llamas", "transformers"]
