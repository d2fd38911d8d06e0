"""Types of numpy arrays, as text: numpy is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    import numpy.typing as npt

AnyArray: TypeAlias = "npt.NDArray[Any]"
Reals: TypeAlias = "npt.NDArray[np.float64]"
