"""Piecewise-linear schedules, by hand and against NumPy."""

import numpy as np
import pytest

from headrace.agents.schedules import piecewise_linear

POINTS = ((100, 1.0), (300, 2.0), (301, 0.5), (10**9, 0.0))


@pytest.mark.parametrize(
    ("step", "value"),
    [(0, 1.0), (99, 1.0), (100, 1.0), (150, 1.25), (299, 1.995), (300, 2.0), (301, 0.5)],
)
def test_values(step, value):
    assert piecewise_linear(POINTS, step) == pytest.approx(value, rel=1e-12)


def test_last_value_holds():
    assert piecewise_linear(POINTS, 10**9) == 0.0
    assert piecewise_linear(POINTS, 10**12) == 0.0


def test_one_point_is_constant():
    assert {piecewise_linear(((5, 3.0),), step) for step in (0, 5, 6)} == {3.0}


def test_agrees_with_numpy():
    x, y = zip(*POINTS, strict=True)
    for step in np.random.default_rng(0).integers(0, 2 * 10**9, 200).tolist():
        assert piecewise_linear(POINTS, step) == pytest.approx(np.interp(step, x, y), rel=1e-12)
