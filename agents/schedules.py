"""Coefficients that change as training goes on."""

import bisect
import itertools
import math
from collections.abc import Sequence

from headrace.agents.types import ConfigError

Points = tuple[tuple[int, float], ...]
"""(env steps trained, value) pairs; empty is no schedule."""


def check_points(setting: str, points: Points) -> None:
    """Checks a schedule.

    Raises:
      ConfigError: a step is negative or not above the one before, or a value is not finite or
        negative.
    """
    steps = [step for step, _ in points]
    if any(b <= a for a, b in itertools.pairwise(steps)) or min(steps, default=0) < 0:
        raise ConfigError(setting, points, "steps must be 0 or more and rise from pair to pair")
    if not all(0 <= value < math.inf for _, value in points):
        raise ConfigError(setting, points, "values must be finite, 0 or more")


def piecewise_linear(points: Sequence[tuple[int, float]], step: int) -> float:
    """The value at a step: exact at the points, linear between, constant before and after them."""
    after = bisect.bisect_right(points, step, key=lambda point: point[0])
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1 : after + 1]
    return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
