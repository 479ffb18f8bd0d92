"""What V-trace should give: equation 1 in plain Python, hand-worked cases, and `check`.

Nothing here shares code, or the recursion, with the module under test.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]  # vs, pg_advantages

FLOATS = ("log_rhos", "discounts", "rewards", "values", "next_values")
TENSORS = (*FLOATS, "ends", "valid")


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one call. Arrays are [T, B]."""

    log_rhos: Array
    discounts: Array
    rewards: Array
    values: Array
    next_values: Array
    ends: Array
    valid: Array
    rho_bar: float | None = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float | None = 1.0
    lambda_: float = 1.0

    def arguments(self, dtype: npt.DTypeLike = np.float64) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {name: tf.constant(fields[name], dtype) for name in FLOATS}

    def map(self, f: Callable[[Array], Array]) -> "Case":
        """The same case with f applied to every array."""
        return replace(self, **{name: f(getattr(self, name)) for name in TENSORS})


def replace(case: Case, **changes: Any) -> Case:
    return dataclasses.replace(case, **changes)


def join(cases: Sequence[Case], axis: int) -> Case:
    """Puts cases one after the other in time (axis 0) or side by side (axis 1)."""
    joined = {n: np.concatenate([getattr(c, n) for c in cases], axis) for n in TENSORS}
    return replace(cases[0], **joined)


def column(
    *,
    rho: Sequence[float],
    reward: Sequence[float],
    value: Sequence[float],
    bootstrap: float,
    gamma: float = 0.9,
    terminated: Sequence[int] = (),
    final_values: Mapping[int, float] | None = None,
    invalid: Sequence[int] = (),
    **coefficients: Any,
) -> Case:
    """A case with B = 1. `final_values` has V(final observation) for each truncated step."""
    final_values = final_values or {}
    steps = np.arange(len(rho))
    next_values = np.array([*value[1:], bootstrap], np.float64)
    for t, final_value in final_values.items():
        next_values[t] = final_value

    def vertical(x: Any) -> Array:
        return np.asarray(x)[:, None]

    return Case(
        log_rhos=vertical(np.log(np.asarray(rho, np.float64))),
        discounts=vertical(np.where(np.isin(steps, list(terminated)), 0.0, gamma)),
        rewards=vertical(np.asarray(reward, np.float64)),
        values=vertical(np.asarray(value, np.float64)),
        next_values=vertical(next_values),
        ends=vertical(np.isin(steps, [*terminated, *final_values])),
        valid=vertical(~np.isin(steps, list(invalid))),
        **coefficients,
    )


GO, TERMINATE, TRUNCATE, INVALID = range(4)


def random_case(kinds: Array, seed: int, **coefficients: Any) -> Case:
    """Random numbers for steps of the given kinds, [T, B]. Importance weights from 0.05 to 12.

    The numbers are exact in float32, so that both precisions see the same inputs.
    """
    rng = np.random.default_rng(seed)

    def normal(scale: float) -> Array:
        return rng.normal(0, scale, kinds.shape).astype(np.float32).astype(np.float64)

    rhos = rng.uniform(math.log(0.05), math.log(12), kinds.shape)
    values, next_values = normal(2), normal(2)
    goes_on = (kinds[:-1] == GO) & (kinds[1:] != INVALID)
    next_values[:-1] = np.where(goes_on, values[1:], next_values[:-1])
    discounts = rng.choice([0.875, 0.984375, 1.0, 0.5], kinds.shape)
    return Case(
        log_rhos=rhos.astype(np.float32).astype(np.float64),
        discounts=np.where(kinds == TERMINATE, 0.0, discounts),
        rewards=normal(1),
        values=values,
        next_values=next_values,
        ends=(kinds == TERMINATE) | (kinds == TRUNCATE),
        valid=kinds != INVALID,
        **coefficients,
    )


def segments(case: Case, b: int) -> Iterator[list[int]]:
    """The runs of rows of column b that belong to one episode."""
    rows: list[int] = []
    for t in range(len(case.values)):
        if case.valid[t, b]:
            rows.append(t)
        if rows and (not case.valid[t, b] or case.ends[t, b]):
            yield rows
            rows = []
    if rows:
        yield rows


def oracle(case: Case) -> Pair:
    """Equation 1, a sum of products for each target, segment by segment."""
    vs, advantages = np.zeros(case.values.shape), np.zeros(case.values.shape)
    for b in range(case.values.shape[1]):
        for rows in segments(case, b):
            reward, discount, rho, value = (
                [float(x[t, b]) for t in rows]
                for x in (case.rewards, case.discounts, case.log_rhos, case.values)
            )
            rho = [math.exp(min(x, 20.0)) for x in rho]
            bootstrap = float(case.next_values[rows[-1], b])
            value.append(bootstrap)
            steps = range(len(rows))

            def clipped(x: float, bar: float | None) -> float:
                return x if bar is None else min(x, bar)

            c = [case.lambda_ * min(x, case.c_bar) for x in rho]
            delta = [
                clipped(rho[t], case.rho_bar) * (reward[t] + discount[t] * value[t + 1] - value[t])
                for t in steps
            ]
            v = [
                value[s]
                + sum(
                    math.prod(discount[i] * c[i] for i in range(s, t)) * delta[t] for t in steps[s:]
                )
                for s in steps
            ]
            v.append(bootstrap)
            for s, t in enumerate(rows):
                vs[t, b] = v[s]
                advantages[t, b] = clipped(rho[s], case.pg_rho_bar) * (
                    reward[s] + discount[s] * v[s + 1] - value[s]
                )
    return vs, advantages


def run(vtrace: Callable[..., Any], case: Case, dtype: npt.DTypeLike = np.float64) -> Pair:
    returns = vtrace(**case.arguments(dtype))
    return returns.vs.numpy(), returns.pg_advantages.numpy()


def assert_pairs(got: Pair, want: Pair, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol, atol, err_msg="vs")
    np.testing.assert_allclose(got[1], want[1], rtol, atol, err_msg="pg_advantages")


def assert_column(got: Pair, vs: Sequence[float], advantages: Sequence[float]) -> None:
    assert_pairs(got, (np.array(vs)[:, None], np.array(advantages)[:, None]))


# Worked by hand. gamma .9, r = 1 2 3, V = .5 1 -.5, bootstrap 2.
_three = functools.partial(column, reward=[1, 2, 3], value=[0.5, 1, -0.5], bootstrap=2)
_off = functools.partial(_three, rho=[0.5, 2, 4])
# The same with an end: r = 1 2 0 -1, V = .5 1 -.5 2, terminated after t = 1.
_four = functools.partial(
    column,
    rho=[0.5, 2, 1, 0.25],
    reward=[1, 2, 0, -1],
    value=[0.5, 1, -0.5, 2],
    terminated=[1],
)

GOLDENS: dict[str, tuple[Case, list[float], list[float]]] = {
    # v2 = 3 + .9 * 2, v1 = 2 + .9 * 4.8, v0 = 1 + .9 * 6.32: the n-step return. adv = v - V.
    "on_policy": (_three(rho=[1, 1, 1]), [6.688, 6.32, 4.8], [6.188, 5.32, 5.3]),
    # v0 = .5 + .5 * (1 + .9 * 1 - .5) + .9 * .5 * (6.32 - 1). adv0 = .5 * (1 + .9 * 6.32 - .5).
    "clips_1_1": (_off(), [3.594, 6.32, 4.8], [3.094, 5.32, 5.3]),
    # delta = .7, 2 * .55, 3 * 5.3; c = .5 1 1. v1 = 1 + 1.1 + .9 * 15.9.
    # v0 = .5 + .7 + .45 * 15.41. adv1 = 2 * (2 + .9 * 15.4 - 1), adv2 = 2 * 5.3.
    "clips_3_2": (
        _off(rho_bar=3.0, pg_rho_bar=2.0),
        [8.1345, 16.41, 15.4],
        [7.6345, 29.72, 10.6],
    ),
    # v1 = 1 + .55 + .9 * .8 * 5.3, v0 = .5 + .7 + .9 * .8 * .5 * 4.366.
    # adv0 = .5 * (1 + .9 * 5.366 - .5): SEED's form. RLax's would be 2.27176, 4.366, 5.3.
    "lambda_0.8": (_off(lambda_=0.8), [2.77176, 5.366, 4.8], [2.6647, 5.32, 5.3]),
    # v = V + delta. adv0 = .5 * (1 + .9 * 1.55 - .5). RLax's would be .7, .55, 5.3.
    "lambda_0": (_off(lambda_=0.0), [1.2, 1.55, 4.8], [0.9475, 5.32, 5.3]),
    # v1 = 2, its reward. v0 = 1.2 + .45 * (2 - 1). adv0 = .5 * (1 + .9 * 2 - .5).
    "terminated": (_off(terminated=[1]), [1.65, 2, 4.8], [1.15, 1, 5.3]),
    # v1 = 2 + .9 * 7. v0 = 1.2 + .45 * 7.3. adv0 = .5 * (1 + .9 * 8.3 - .5).
    "truncated": (_off(final_values={1: 7}), [4.485, 8.3, 4.8], [3.985, 7.3, 5.3]),
    # Every value is right as it is. Looking across the cut makes the second advantage 99.
    "truncated_no_error": (
        column(
            rho=[1] * 4,
            gamma=1,
            reward=[0] * 4,
            value=[1, 1, 100, 100],
            bootstrap=100,
            final_values={1: 1},
        ),
        [1, 1, 100, 100],
        [0] * 4,
    ),
    # v3 = 2 + .25 * (-1 + 2.7 - 2). v2 = -.5 + 2.3 + .9 * (1.925 - 2). adv2 = .9 * 1.925 + .5.
    "four_clips_1_1": (
        _four(bootstrap=3),
        [1.65, 2, 1.7325, 1.925],
        [1.15, 1, 2.2325, -0.075],
    ),
    # v1 = 1 + 2 * 1. v0 = 1.2 + .45 * (3 - 1). adv0 = .5 * (1 + .9 * 3 - .5), adv1 = 2 * 1.
    "four_no_clips": (
        _four(bootstrap=3, rho_bar=None, pg_rho_bar=None),
        [2.1, 3, 1.7325, 1.925],
        [1.6, 2, 2.2325, -0.075],
    ),
    "four_clips_2_1": (
        _four(bootstrap=3, rho_bar=2.0),
        [2.1, 3, 1.7325, 1.925],
        [1.6, 1, 2.2325, -0.075],
    ),
    # v3 = 2 + .25 * (-1 + 1.8 - 2). v2 = 1.8 + .9 * (1.7 - 2).
    "four_bootstrap_2": (
        _four(bootstrap=2),
        [1.65, 2, 1.53, 1.7],
        [1.15, 1, 2.03, -0.3],
    ),
    # v = V + rho * (r + .9 * 2 - V) = 1 + 2 * (3 + 1.8 - 1). adv = 1.5 * 3.8.
    "one_step": (
        column(rho=[4], reward=[3], value=[1], bootstrap=2, rho_bar=2.0, pg_rho_bar=1.5),
        [8.6],
        [5.7],
    ),
}

# Episode ends of each kind, rows to mask at the start, inside and at the end, and a lone T = 1.
_KINDS = np.array(
    [
        [GO, GO, GO, INVALID, GO],
        [GO, TERMINATE, GO, INVALID, TRUNCATE],
        [GO, GO, TRUNCATE, GO, INVALID],
        [GO, GO, INVALID, GO, GO],
        [GO, TERMINATE, GO, GO, GO],
        [GO, TRUNCATE, GO, INVALID, INVALID],
        [GO, GO, TERMINATE, GO, INVALID],
    ]
)
BATTERY = (
    random_case(_KINDS, 1, rho_bar=3.7, pg_rho_bar=2.2),
    random_case(_KINDS, 2, rho_bar=2.2, pg_rho_bar=3.7, c_bar=0.7, lambda_=0.9),
    random_case(_KINDS, 3, rho_bar=3.0, pg_rho_bar=None, c_bar=2.0),
    random_case(_KINDS[:1], 4, rho_bar=None),
)


def poison(case: Case, numbers: Sequence[float] = (math.nan, math.inf, -math.inf)) -> Case:
    """The case with every number of its invalid rows replaced, and their ends marked."""
    hidden = ~case.valid
    filler = np.resize(numbers, case.values.shape)
    poisoned = {name: np.where(hidden, filler, getattr(case, name)) for name in FLOATS}
    return replace(case, ends=case.ends | hidden, **poisoned)


def check_extremes(vtrace: Callable[..., Any]) -> None:
    """Weights of 0, of any size, and of the cap: rho = exp(log_rho) never gives inf or NaN."""
    logs = np.array([-math.inf, -1e3, 0.0, 1e3, math.inf])[None]
    one = np.ones(logs.shape)
    case = Case(logs, 0.5 * one, one, one, 4 * one, one > 0, one > 0)
    # r + d V' - V = 1 + 2 - 1 = 2, so v = 1 + 2 rho and adv = 2 rho.
    for bar, largest in ((1.0, 1.0), (3.0, 3.0), (None, math.exp(20))):
        want = np.array([[0, 0, 1, largest, largest]])
        for dtype, rtol in ((np.float32, 1e-6), (np.float64, 1e-9)):
            got = run(vtrace, replace(case, rho_bar=bar, pg_rho_bar=bar), dtype)
            assert_pairs(got, (1 + 2 * want, 2 * want), rtol)


def check_long_unroll(vtrace: Callable[..., Any], c_bar: float) -> None:
    """No errors to carry, and a cut on the way: 5 ** 64 is beyond float32, and inf * 0 is NaN."""
    ends = np.arange(200)[:, None] % 100 == [99, 7]
    one = np.ones(ends.shape)
    case = Case(1e3 * one, one, 0 * one, one, one, ends, one > 0, rho_bar=None, c_bar=c_bar)
    assert_pairs(run(vtrace, case, np.float32), (one, 0 * one))


def check_no_gradient(vtrace: Callable[..., Any]) -> None:
    arguments = BATTERY[0].arguments()
    sources = [arguments[name] for name in FLOATS]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(sources)
        returns = vtrace(**arguments)
    for output in returns:
        assert all(gradient is None for gradient in tape.gradient(output, sources))


def check(vtrace: Callable[..., Any]) -> None:
    """Raises AssertionError unless vtrace is V-trace."""
    for case, vs, advantages in GOLDENS.values():
        assert_column(run(vtrace, case), vs, advantages)
    for case in BATTERY:
        assert_pairs(run(vtrace, case), oracle(case))
        assert_pairs(run(vtrace, poison(case)), oracle(case))
    check_extremes(vtrace)
    check_long_unroll(vtrace, c_bar=5.0)
    check_no_gradient(vtrace)
