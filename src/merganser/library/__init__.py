"""Experts on disk: low-rank factors (TSV-Compress), masks, and adapters in and out.

Start with `Library`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merganser.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "library": ("Library",),
        "adapter_merging": ("merge_adapters",),
        "lora": ("extract_lora",),
        "masks": ("MaskLibrary",),
    },
)

if TYPE_CHECKING:
    from merganser.library.adapter_merging import merge_adapters as merge_adapters
    from merganser.library.library import Library as Library
    from merganser.library.lora import extract_lora as extract_lora
    from merganser.library.masks import MaskLibrary as MaskLibrary
