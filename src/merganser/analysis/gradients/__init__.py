"""Task vectors as approximate gradients: expansion, bounds and the PA-ATM descent condition.

    losses = TaskLosses.of(module, F.cross_entropy, {"a": (x, y), "b": (u, v)})
    gap(losses, eta=0.1, alpha=0.5, epochs=1).gap          # rounding: one epoch of task arithmetic is one joint step
    observed_order(losses, [.02, .01, .005], alpha=0.5, epochs=3).residual_slope   # 3
    check_bound(losses, eta=0.01, alpha=0.5, epochs=3)     # ‖C‖ against its bound

docs/theory.md has the mathematics, and says where the thesis prints something else.
"""

from merganser.analysis.gradients.bounds import (
    Bound,
    BoundCheck,
    NetworkConstants,
    check_bound,
    curvature_bound,
    derivative_bounds,
    hessian_norm,
    network_constants,
)
from merganser.analysis.gradients.descent import DescentCheck, descent_check
from merganser.analysis.gradients.expansion import (
    Gap,
    Order,
    curvature_term,
    descend,
    expert_paths,
    gap,
    joint_path,
    mismatch,
    observed_order,
    task_arithmetic,
)
from merganser.analysis.gradients.losses import TaskLosses

__all__ = [
    "Bound",
    "BoundCheck",
    "DescentCheck",
    "Gap",
    "NetworkConstants",
    "Order",
    "TaskLosses",
    "check_bound",
    "curvature_bound",
    "curvature_term",
    "derivative_bounds",
    "descend",
    "descent_check",
    "expert_paths",
    "gap",
    "hessian_norm",
    "joint_path",
    "mismatch",
    "network_constants",
    "observed_order",
    "task_arithmetic",
]
