"""V-trace, the off-policy correction of IMPALA: value targets and policy-gradient advantages.

Definitions: Espeholt et al. 2018, "IMPALA", arXiv:1802.01561, section 4.1 (equation 1; remark 1,
the recursion; remark 2, lambda) and section 4.2 (the policy gradient).
"""

import math
from typing import NamedTuple

import tensorflow as tf

MAX_LOG_RHO = 20.0
"""Cap on log(pi / mu), in nats, where no clip or a larger one is asked for.

exp(20) = 4.9e8 is beyond any useful importance weight, and leaves float32 room for its products.
"""


class VTraceReturns(NamedTuple):
    """Constants for the losses: no gradient flows through either.

    Attributes:
      vs: [T, B], the value targets v_t, in units of return. 0 where `valid` is false.
      pg_advantages: [T, B], the weights of grad log pi(a_t | x_t), in units of return; the clipped
        importance weight is already in them. 0 where `valid` is false.
    """

    vs: tf.Tensor
    pg_advantages: tf.Tensor


def vtrace(
    *,
    log_rhos: tf.Tensor,
    discounts: tf.Tensor,
    rewards: tf.Tensor,
    values: tf.Tensor,
    next_values: tf.Tensor,
    ends: tf.Tensor,
    valid: tf.Tensor,
    rho_bar: float | None = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """Computes the V-trace targets and advantages of a batch of unrolls.

    With pi / mu = exp(log_rhos), per step t of one column::

      rho_t   = min(rho_bar, pi / mu)
      c_t     = lambda * min(c_bar, pi / mu)
      delta_t = rho_t * (r_t + d_t * V(x_{t+1}) - V(x_t))
      v_t     = V(x_t) + delta_t + d_t * c_t * (v_{t+1} - V(x_{t+1}))
      adv_t   = min(pg_rho_bar, pi / mu) * (r_t + d_t * v_{t+1} - V(x_t))

    where v_{t+1} is V(x_{t+1}) once the trace is cut: at an episode's end, at the last row, and
    before a row that is not valid. On-policy, with c_bar >= 1 and lambda = 1, v_t is the n-step
    return. The advantage looks ahead to v_{t+1} whatever lambda is, as in SEED RL
    (google-research/seed_rl, common/vtrace.py); RLax mixes lambda v_{t+1} + (1 - lambda) V(x_{t+1})
    there instead.

    All tensors are [T, B], time first, T static. The floating ones share one dtype, float32 or
    float64, which is also the dtype of the result.

    Args:
      log_rhos: log pi(a_t | x_t) - log mu(a_t | x_t), in nats, target less behaviour policy. Any
        size: -inf is a weight of 0, +inf the largest weight that the clip allows.
      discounts: gamma, and 0 where the episode terminated at step t. In [0, 1].
      rewards: r_t, what action a_t earned.
      values: V(x_t).
      next_values: V of the true successor of x_t. Inside an episode this is `values[t + 1]`; at a
        truncation V of the final observation, never of the one after the reset; in the last row the
        bootstrap value.
      ends: bool, the episode ended at step t, terminated or truncated.
      valid: bool, false for padding and autoreset rows. Nothing that stands in such a row, NaN
        included, reaches any other row. The caller masks them out of its losses.
      rho_bar: clip of the weight of delta_t; decides which policy's value is learnt. None: no clip.
      c_bar: clip of the trace; affects only the speed of learning. At most rho_bar.
      pg_rho_bar: clip of the weight of the advantage. None: no clip.
      lambda_: trace decay, in [0, 1].

    Returns:
      The targets and the advantages. See `VTraceReturns`.

    Raises:
      TypeError: a tensor has the wrong dtype.
      ValueError: a tensor has the wrong shape, or a coefficient is out of its range.
    """
    _check_coefficients(rho_bar, c_bar, pg_rho_bar, lambda_)
    floats, (ends, valid) = _as_tensors(
        {
            "log_rhos": log_rhos,
            "discounts": discounts,
            "rewards": rewards,
            "values": values,
            "next_values": next_values,
        },
        {"ends": ends, "valid": valid},
    )
    # Select before any arithmetic, for 0 * NaN is NaN. An all-zero row has delta = 0 and passes no
    # trace on, so v - V = 0 there, and the row before it is cut and bootstraps with no more ado.
    log_rhos, discounts, rewards, values, next_values = (
        tf.where(valid, x, tf.zeros_like(x)) for x in floats
    )
    rhos = tf.exp(tf.minimum(log_rhos, MAX_LOG_RHO))  # Capped in log space: exp cannot overflow.
    deltas = _clip(rhos, rho_bar) * (rewards + discounts * next_values - values)
    cs = lambda_ * tf.minimum(rhos, c_bar)
    # The discount alone does not cut: a truncated step keeps its discount, to bootstrap.
    continues = tf.cast(tf.logical_not(ends), values.dtype)
    errors = _affine_scan(deltas, discounts * cs * continues)  # v_t - V(x_t)

    vs = values + errors
    next_vs = next_values + continues * _ahead(errors, 1)
    pg_advantages = _clip(rhos, pg_rho_bar) * (rewards + discounts * next_vs - values)
    return VTraceReturns(tf.stop_gradient(vs), tf.stop_gradient(pg_advantages))


def _affine_scan(offsets: tf.Tensor, slopes: tf.Tensor) -> tf.Tensor:
    """Solves y_t = offset_t + slope_t * y_{t+1}, y_T = 0, for slopes >= 0, in log2(T) passes.

    Composes the maps y -> offset + slope * y by doubling (Hillis and Steele 1986): after the pass
    with stride k, row t holds the composition of the maps t to t + 2k - 1. Straight-line code: no
    loop op for the graph to run, and little for XLA to compile.
    """
    stride = 1
    while stride < offsets.shape[0]:
        offsets = offsets + slopes * _ahead(offsets, stride)
        # Saturates, as c_bar > 1 may overflow over a long unroll, and inf * 0 would be NaN.
        slopes = tf.minimum(slopes * _ahead(slopes, stride), slopes.dtype.max)
        stride *= 2
    return offsets


def _ahead(x: tf.Tensor, steps: int) -> tf.Tensor:
    """Row t of the result is row t + steps of x, and 0 past the end."""
    return tf.pad(x[steps:], [[0, steps], [0, 0]])


def _clip(rhos: tf.Tensor, bar: float | None) -> tf.Tensor:
    return rhos if bar is None else tf.minimum(rhos, bar)


def _check_coefficients(
    rho_bar: float | None, c_bar: float, pg_rho_bar: float | None, lambda_: float
) -> None:
    # Each is written so that NaN fails it.
    for name, bar in (("rho_bar", rho_bar), ("pg_rho_bar", pg_rho_bar)):
        if bar is not None and not 0 < bar < math.inf:
            raise ValueError(f"{name} is {bar}: give a finite number > 0, or None for no clip")
    if not 0 <= c_bar < math.inf:
        raise ValueError(f"c_bar is {c_bar}: give a finite number >= 0")
    if rho_bar is not None and not c_bar <= rho_bar:
        raise ValueError(
            f"c_bar is {c_bar} and rho_bar is {rho_bar}: V-trace assumes c_bar <= rho_bar, "
            "so lower c_bar or raise rho_bar"
        )
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"lambda_ is {lambda_}: give a number in [0, 1]")


def _as_tensors(
    floats: dict[str, tf.Tensor], bools: dict[str, tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Converts the arguments, and checks their dtypes and static shapes."""
    floats = {name: tf.convert_to_tensor(x) for name, x in floats.items()}
    bools = {name: tf.convert_to_tensor(x) for name, x in bools.items()}
    for name, x in floats.items():
        if x.dtype not in (tf.float32, tf.float64):
            raise TypeError(f"{name} is {x.dtype.name}: give float32 or float64")
        if x.dtype != floats["values"].dtype:
            raise TypeError(
                f"{name} is {x.dtype.name} and values is {floats['values'].dtype.name}: "
                "give both the same dtype"
            )
    for name, x in bools.items():
        if x.dtype != tf.bool:
            raise TypeError(f"{name} is {x.dtype.name}: give bool")
    for name, x in (floats | bools).items():
        if x.shape.rank != 2 or not x.shape[0]:
            raise ValueError(f"{name} has shape {x.shape}: give [T, B] with T static and >= 1")
    for name, x in (floats | bools).items():
        if not x.shape.is_compatible_with(floats["values"].shape):
            raise ValueError(
                f"{name} has shape {x.shape} and values has {floats['values'].shape}: "
                "give all tensors the same [T, B]"
            )
    return list(floats.values()), list(bools.values())
