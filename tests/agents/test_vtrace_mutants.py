"""A test of the tests: `check` must tell V-trace from V-trace with one fault."""

import types
from pathlib import Path

import pytest
from vtrace_oracle import check

from headrace.agents import vtrace as module

SOURCE = Path(module.__file__).read_text(encoding="utf-8")

_RHO = "_clip(rhos, rho_bar)"
_PG = "_clip(rhos, pg_rho_bar)"
_C = "tf.minimum(rhos, c_bar)"
_SLOPES = "discounts * cs * continues"
_NEXT_VS = "next_values + continues * _ahead(errors, 1)"
_SELECT = "tf.where(valid, x, tf.zeros_like(x))"
_NEXT_IN_DELTA = "discounts * next_values - values"
_LAST_ROW = "tf.pad(next_values[-1:], [[next_values.shape[0] - 1, 0], [0, 0]])"

MUTANTS: dict[str, tuple[str, str]] = {
    "rho_unclipped": (_RHO, "rhos"),
    "rho_missing_in_delta": (_RHO, "1.0"),
    "pg_unclipped": (_PG, "rhos"),
    "pg_uses_rho_bar": (_PG, "_clip(rhos, rho_bar)"),
    "pg_weight_twice": (_PG, "_clip(rhos, pg_rho_bar) ** 2"),
    "pg_weight_missing": (_PG, "1.0"),
    "c_unclipped": (_C, "rhos"),
    "c_left_out": (_C, "1.0"),
    "c_uses_rho_bar": (_C, "_clip(rhos, rho_bar)"),
    "c_shifted": ("lambda_ * " + _C, "lambda_ * _ahead(tf.minimum(rhos, c_bar), 1)"),
    "lambda_left_out": ("lambda_ * " + _C, _C),
    "discount_missing_in_trace": (_SLOPES, "cs * continues"),
    "cut_missing_in_trace": (_SLOPES, "discounts * cs"),
    "cut_missing_in_advantage": (_NEXT_VS, "next_values + _ahead(errors, 1)"),
    "every_end_terminates": (
        _NEXT_IN_DELTA,
        "discounts * tf.where(ends, 0 * values, next_values) - values",
    ),
    "advantage_with_next_value": (_NEXT_VS, "next_values"),
    "advantage_with_own_target": (_NEXT_VS, "vs"),
    "advantage_mixes_lambda": (_NEXT_VS, "next_values + lambda_ * continues * _ahead(errors, 1)"),
    "advantage_less_target": ("discounts * next_vs - values", "discounts * next_vs - vs"),
    "bootstrap_dropped": (_NEXT_IN_DELTA, f"discounts * (next_values - {_LAST_ROW}) - values"),
    "bootstrap_dropped_in_advantage": (_NEXT_VS, f"{_NEXT_VS} - {_LAST_ROW}"),
    "bootstrap_doubled": (
        "_affine_scan(deltas, discounts * cs * continues)",
        f"_affine_scan(deltas + discounts * cs * {_LAST_ROW}, discounts * cs * continues)",
    ),
    "next_value_after_reset": (
        _NEXT_IN_DELTA,
        "discounts * tf.concat([values[1:], next_values[-1:]], 0) - values",
    ),
    "bootstrap_from_own_value": (
        _NEXT_IN_DELTA,
        "discounts * tf.where(ends, values, next_values) - values",
    ),
    "mask_ignored": (_SELECT, "x"),
    "mask_after_arithmetic": (_SELECT, "x * tf.cast(valid, x.dtype)"),
    "log_rho_uncapped": ("tf.exp(tf.minimum(log_rhos, MAX_LOG_RHO))", "tf.exp(log_rhos)"),
    "scan_one_pass_short": (
        "while stride < offsets.shape[0]",
        "while 2 * stride < offsets.shape[0]",
    ),
    "scan_slopes_not_composed": ("slopes * _ahead(slopes, stride)", "slopes"),
    "scan_slopes_overflow": (
        "tf.minimum(slopes * _ahead(slopes, stride), slopes.dtype.max)",
        "slopes * _ahead(slopes, stride)",
    ),
    "gradient_through_targets": ("tf.stop_gradient(vs)", "vs"),
    "gradient_through_advantages": ("tf.stop_gradient(pg_advantages)", "pg_advantages"),
}


def load(source: str) -> types.ModuleType:
    loaded = types.ModuleType("mutant")
    exec(compile(source, "mutant", "exec"), loaded.__dict__)
    return loaded


def test_the_real_one_lives() -> None:
    check(load(SOURCE).vtrace)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(name: str) -> None:
    text, fault = MUTANTS[name]
    assert SOURCE.count(text) == 1
    mutant = load(SOURCE.replace(text, fault))
    with pytest.raises(AssertionError):
        check(mutant.vtrace)
