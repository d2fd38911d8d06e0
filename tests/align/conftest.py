"""Libraries of models that several tests derive symmetries of."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock

import pytest


class _Stub(ModuleType):
    """Stands in for a package while another one is imported: every name in it exists and does nothing."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        return MagicMock(name=f"{self.__name__}.{name}")


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    """timm's models need nothing of torchvision, which its data loading imports and which has no build everywhere."""
    parts = ("", ".transforms", ".transforms.functional", ".ops", ".ops.misc", ".datasets", ".datasets.folder")
    parts += (".transforms.v2", ".models", ".models.feature_extraction", ".utils")
    with pytest.MonkeyPatch.context() as patch:
        for part in parts:
            patch.setitem(sys.modules, f"torchvision{part}", _Stub(f"torchvision{part}"))
        return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers")
