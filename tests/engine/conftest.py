from __future__ import annotations

import pytest
from torch import Tensor

from support.plans import random_models


@pytest.fixture
def models() -> list[dict[str, Tensor]]:
    return random_models()
