"""Decide which changed tensors are stored, compared and merged as matrices, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from merganser.methods.matrices import matrix_shape

if TYPE_CHECKING:
    from torch import Tensor


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a change of a tensor of this shape is a task matrix.

    These are matrices, and convolution kernels as output × (input · window), the matrix that multiplies a patch of the
    input. Not treated as matrices, because they do not act as one:

    - tensors with a single row or column;
    - kernels with an input axis of one, as in depthwise convolutions: each row is a separate filter, and there is
      little to save;
    - tensors with three axes whose last is longer than the first: stacks of matrices, such as experts of a mixture.

    Args:
        shape: The shape of the tensor.

    Returns:
        Whether `matrix_shape(shape)` is a matrix worth decomposing.

    Example:
        >>> is_matrix((64, 32, 3, 3)), is_matrix((64, 1, 3, 3)), is_matrix((8, 256, 128))
        (True, False, False)
    """
    whole = tuple(shape)
    if len(whole) < 2 or min(matrix_shape(whole)) < 2:
        return False
    if len(whole) == 3 and whole[2] > whole[0]:
        return False
    return len(whole) == 2 or whole[1] > 1


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor with two or more axes as output × everything else."""
    return tensor.flatten(1) if tensor.dim() > 2 else tensor
