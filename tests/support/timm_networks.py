"""timm's networks without torchvision, which timm wants for image transforms that its networks do not use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from torch import nn


class _Placeholder(type):
    """A class whose members are their own names, such as InterpolationMode.NEAREST."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Placeholders(MetaPathFinder, Loader):
    """Modules of the name `torchvision…` with empty classes for whatever is asked of them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Placeholder(name, (), {})

        vars(module)["__getattr__"] = missing
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def vision_transformer(**options: Any) -> nn.Module:
    """A timm ViT with random weights; the test is skipped without timm."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    finder = _Placeholders()
    placed = importlib.util.find_spec("torchvision") is None
    if placed:
        sys.meta_path.append(finder)
    try:
        module = importlib.import_module("timm.models.vision_transformer")
    finally:
        if placed:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    network: nn.Module = module.VisionTransformer(**options)
    return network
