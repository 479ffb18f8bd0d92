import functools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from vtrace_oracle import (
    BATTERY,
    FLOATS,
    GO,
    GOLDENS,
    INVALID,
    TENSORS,
    TERMINATE,
    TRUNCATE,
    Array,
    Case,
    assert_column,
    assert_pairs,
    check,
    check_extremes,
    check_long_unroll,
    check_no_gradient,
    column,
    join,
    oracle,
    poison,
    random_case,
    replace,
    run,
)

from headrace.agents.vtrace import vtrace

# The oracle, and the hand-worked numbers


def test_check() -> None:
    check(vtrace)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    case, vs, advantages = GOLDENS[name]
    assert_column(run(vtrace, case), vs, advantages)
    # So that neither can be wrong alone.
    assert_column(oracle(case), vs, advantages)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    t, b = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    kind = st.sampled_from([GO, GO, GO, TERMINATE, TRUNCATE, INVALID])
    kinds = draw(st.lists(kind, min_size=t * b, max_size=t * b))
    bars = st.sampled_from([1.0, 2.2, 3.7, None])
    return random_case(
        np.reshape(kinds, (t, b)),
        seed=draw(st.integers(0, 2**32 - 1)),
        rho_bar=draw(bars),
        pg_rho_bar=draw(bars),
        c_bar=draw(st.sampled_from([0.0, 0.3, 0.95, 1.0])),
        lambda_=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
    )


@given(cases())
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_agrees_with_equation_1(case: Case) -> None:
    want = oracle(case)
    assert_pairs(run(vtrace, case), want)
    # Weights of 12 and values of 2 add up to hundreds, of which float32 keeps seven digits.
    assert_pairs(run(vtrace, poison(case), np.float32), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 31, 32, 33])
def test_every_length(t: int) -> None:
    case = random_case(np.full((t, 2), GO), t)
    assert_pairs(run(vtrace, case), oracle(case))


# Identities


def test_on_policy_is_the_n_step_return() -> None:
    case = random_case(np.full((9, 2), GO), 0)
    case = replace(case, log_rhos=np.zeros((9, 2)))
    want, after = np.zeros((9, 2)), case.next_values[-1]
    for t in reversed(range(9)):
        want[t] = after = case.rewards[t] + case.discounts[t] * after
    assert_pairs(run(vtrace, case), (want, want - case.values))


@pytest.mark.parametrize("end", [TERMINATE, TRUNCATE])
def test_an_end_inside_equals_the_parts_alone(end: int) -> None:
    first = random_case(np.array([[GO], [GO], [end]]), 1)
    second = random_case(np.array([[GO], [GO], [GO], [GO]]), 2)
    parts = [run(vtrace, part) for part in (first, second)]
    joined = run(vtrace, join([first, second], axis=0))
    assert_pairs(
        joined, (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))
    )


def test_a_truncated_end_equals_the_last_row() -> None:
    case = random_case(np.full((5, 2), GO), 3)
    ended = replace(case, ends=np.arange(5)[:, None] == [4, 4])
    assert_pairs(run(vtrace, ended), run(vtrace, case))


def test_columns_do_not_meet() -> None:
    case, order = BATTERY[0], [3, 0, 4, 1, 2]
    vs, advantages = run(vtrace, case)
    permuted = run(vtrace, case.map(lambda x: x[:, order]))
    assert_pairs(permuted, (vs[:, order], advantages[:, order]))
    alone = run(vtrace, case.map(lambda x: x[:, 2:3]))
    assert_pairs(alone, (vs[:, 2:3], advantages[:, 2:3]))


def test_scales_with_the_reward() -> None:
    case = BATTERY[0]
    tripled = replace(
        case, rewards=3 * case.rewards, values=3 * case.values, next_values=3 * case.next_values
    )
    vs, advantages = run(vtrace, case)
    assert_pairs(run(vtrace, tripled), (3 * vs, 3 * advantages))


def test_v_is_a_fixed_point_where_there_is_no_error() -> None:
    # gamma .9 and r = 1 for ever are worth 10.
    case = column(rho=[0.1, 3, 9], reward=[1] * 3, value=[10] * 3, bootstrap=10)
    assert_column(run(vtrace, case), [10] * 3, [0] * 3)


# Rows that are not valid


def pad_rows(case: Case, rows: int) -> Case:
    padding = random_case(np.full((rows, case.values.shape[1]), INVALID), 9)
    return join([case, padding], axis=0)


def test_padding_changes_nothing() -> None:
    case = random_case(np.array([[GO, GO], [GO, TERMINATE], [GO, GO]]), 5)
    vs, advantages = run(vtrace, case)
    padded = run(vtrace, poison(pad_rows(case, 2)))
    zeros = np.zeros((2, 2))
    assert_pairs(padded, (np.concatenate([vs, zeros]), np.concatenate([advantages, zeros])))


def test_autoreset_row_changes_nothing() -> None:
    first = random_case(np.array([[GO], [TRUNCATE]]), 6)
    reset = random_case(np.array([[INVALID]]), 7)
    second = random_case(np.array([[GO], [GO]]), 8)
    without = run(vtrace, join([first, second], axis=0))
    within = run(vtrace, join([first, reset, second], axis=0))
    assert_pairs((np.delete(within[0], 2, 0), np.delete(within[1], 2, 0)), without)
    assert within[0][2] == within[1][2] == 0


def test_a_column_of_padding_is_all_zero() -> None:
    case = poison(random_case(np.full((4, 2), INVALID), 0))
    assert_pairs(run(vtrace, case), (np.zeros((4, 2)), np.zeros((4, 2))))


def loss_and_gradient(case: Case, dtype: Any = np.float64) -> tuple[float, float]:
    """The masked losses of a critic V = w * feature and of a policy with logit w."""
    mask = tf.constant(case.valid)
    weight = tf.Variable(1.0, dtype=dtype)
    arguments = case.arguments(dtype)
    with tf.GradientTape() as tape:
        arguments["values"] = weight * arguments["values"]
        arguments["next_values"] = weight * arguments["next_values"]
        returns = vtrace(**arguments)
        log_pi = tf.math.log_sigmoid(weight)
        terms = (returns.vs - arguments["values"]) ** 2 - log_pi * returns.pg_advantages
        loss = tf.reduce_sum(tf.boolean_mask(terms, mask)) / tf.reduce_sum(tf.cast(mask, dtype))
    return float(loss), float(tape.gradient(loss, weight))


def test_padding_leaves_loss_and_gradient() -> None:
    case = random_case(np.array([[GO, GO], [GO, TRUNCATE], [GO, GO]]), 5)
    got = loss_and_gradient(poison(pad_rows(case, 3), [7.0, -50.0]))
    assert got == pytest.approx(loss_and_gradient(case))


# Extremes


def test_extreme_weights() -> None:
    check_extremes(vtrace)


@pytest.mark.parametrize("c_bar", [1.0, 5.0])
def test_long_unrolls_stay_finite(c_bar: float) -> None:
    check_long_unroll(vtrace, c_bar)


@pytest.mark.parametrize("name", ["log_rhos", "rewards"])
def test_nan_in_a_valid_row_is_not_hidden(name: str) -> None:
    case = column(rho=[1, 1], reward=[1, 1], value=[1, 1], bootstrap=1)
    for output in run(vtrace, replace(case, **{name: np.array([[1], [math.nan]])})):
        assert np.isnan(output).all()


# TensorFlow


@pytest.mark.parametrize("jit_compile", [False, True])
def test_compiled_agrees_with_eager(jit_compile: bool) -> None:
    compiled = tf.function(vtrace, jit_compile=jit_compile)
    for dtype in (np.float32, np.float64):
        case = poison(BATTERY[2])
        assert_pairs(run(compiled, case, dtype), run(vtrace, case, dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_compiled_extremes(jit_compile: bool) -> None:
    check_extremes(tf.function(vtrace, jit_compile=jit_compile))


def specs(t: int | None, b: int | None) -> dict[str, tf.TensorSpec]:
    return {n: tf.TensorSpec([t, b], tf.float64 if n in FLOATS else tf.bool) for n in TENSORS}


def test_batch_size_may_be_unknown() -> None:
    case = BATTERY[0]
    traced = tf.function(
        functools.partial(vtrace, rho_bar=case.rho_bar, pg_rho_bar=case.pg_rho_bar)
    )
    concrete = traced.get_concrete_function(**specs(7, None))
    arguments = {name: x for name, x in case.arguments().items() if name in TENSORS}
    returns = concrete(**arguments)
    assert_pairs((returns.vs.numpy(), returns.pg_advantages.numpy()), run(vtrace, case))


def test_time_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"give \[T, B\] with T static and >= 1"):
        tf.function(vtrace).get_concrete_function(**specs(None, 2))


def test_no_gradient_flows() -> None:
    check_no_gradient(vtrace)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_keeps_the_dtype(dtype: tf.DType) -> None:
    returns = vtrace(**BATTERY[0].arguments(dtype.as_numpy_dtype))
    assert returns.vs.dtype == returns.pg_advantages.dtype == dtype


# Arguments that are refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rho_bar": 0.0}, "rho_bar is 0.0: give a finite number > 0, or None for no clip"),
        ({"rho_bar": math.inf}, "rho_bar is inf"),
        ({"pg_rho_bar": -1.0}, "pg_rho_bar is -1.0"),
        ({"pg_rho_bar": math.nan}, "pg_rho_bar is nan"),
        ({"c_bar": -0.5}, "c_bar is -0.5: give a finite number >= 0"),
        ({"c_bar": math.inf, "rho_bar": None}, "c_bar is inf"),
        ({"rho_bar": 0.5}, "c_bar is 1.0 and rho_bar is 0.5: V-trace assumes c_bar <= rho_bar"),
        ({"lambda_": 1.1}, r"lambda_ is 1.1: give a number in \[0, 1\]"),
        ({"lambda_": -0.1}, "lambda_ is -0.1"),
        ({"rewards": tf.zeros([3])}, r"rewards has shape \(3,\): give \[T, B\]"),
        ({"values": tf.zeros([3, 1, 1])}, r"values has shape \(3, 1, 1\): give \[T, B\]"),
        ({"rewards": tf.zeros([3, 2])}, r"rewards has shape \(3, 2\) and values has \(3, 1\)"),
        ({"valid": tf.fill([1, 1], True)}, r"valid has shape \(1, 1\) and values has \(3, 1\)"),
    ],
)
def test_wrong_value(change: dict[str, Any], message: str) -> None:
    arguments = column(rho=[1] * 3, reward=[1] * 3, value=[1] * 3, bootstrap=1).arguments(
        np.float32
    )
    with pytest.raises(ValueError, match=message):
        vtrace(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": tf.zeros([3, 1], tf.int32)}, "rewards is int32: give float32 or float64"),
        ({"log_rhos": tf.zeros([3, 1], tf.float16)}, "log_rhos is float16"),
        (
            {"discounts": tf.zeros([3, 1], tf.float64)},
            "discounts is float64 and values is float32",
        ),
        ({"ends": tf.zeros([3, 1])}, "ends is float32: give bool"),
        ({"valid": tf.ones([3, 1], tf.int32)}, "valid is int32: give bool"),
    ],
)
def test_wrong_dtype(change: dict[str, Any], message: str) -> None:
    arguments = column(rho=[1] * 3, reward=[1] * 3, value=[1] * 3, bootstrap=1).arguments(
        np.float32
    )
    with pytest.raises(TypeError, match=message):
        vtrace(**(arguments | change))


# Faults that published implementations had. Each is numbered as in the project's list of them.


def test_a1_dummy_row_after_truncation() -> None:
    # Acme's adders end a truncated episode with a row of zeros. V = 50 is right for r = 1 and
    # gamma .99 within .5. v1 = 1 + .99 * 50, v0 = 1 + .99 * 50.5. Acme gets 1.99, 1.
    case = column(
        rho=[1, 1, 1],
        gamma=0.99,
        reward=[1, 1, 0],
        value=[50, 50, 0],
        bootstrap=0,
        final_values={1: 50},
        invalid=[2],
    )
    assert_column(run(vtrace, case), [50.995, 50.5, 0], [0.995, 0.5, 0])


def test_a2_zero_padding_earns_nothing() -> None:
    # acme#42: zero rows entered the losses, with rho = pi(0 | 0) / uniform and whatever V(0) is.
    # v0 = 1 + .9 * 2, with the padding's rho of 3 and V of 8 nowhere to be seen.
    case = column(
        rho=[1, 3, 3],
        reward=[1, 0, 0],
        value=[1, 8, 8],
        bootstrap=8,
        final_values={0: 2},
        invalid=[1, 2],
    )
    assert_column(run(vtrace, case), [2.8, 0, 0], [1.8, 0, 0])


def test_a3_every_step_gets_a_target() -> None:
    # No last row that only bootstraps: T steps in, T targets out, the last one with its reward.
    # v1 = 5 + .9 * 2, v0 = 1 + .9 * 6.8.
    case = column(rho=[1, 1], reward=[1, 5], value=[0, 0], bootstrap=2)
    assert_column(run(vtrace, case), [7.12, 6.8], [7.12, 6.8])


def test_a4_reward_of_the_last_step_counts() -> None:
    # ray#36013: the last step was cut off to bootstrap from, and the reward at the end with it.
    # v1 = 10, v0 = .9 * 10.
    case = column(rho=[1, 1], reward=[0, 10], value=[0, 0], bootstrap=99, terminated=[1])
    assert_column(run(vtrace, case), [9, 10], [9, 10])


def test_a5_advantage_does_not_see_the_next_episode() -> None:
    # pytorch/rl#4209: the advantage at the end of the first episode was 100 - 1.
    _, advantages = run(vtrace, GOLDENS["truncated_no_error"][0])
    np.testing.assert_allclose(advantages[:, 0], [0, 0, 0, 0])


def test_a6_bootstrap_counts_once() -> None:
    # rl-triton#4 also started the recursion at the bootstrap: + 2 * .9 ** 3, 2 * .9 ** 2, 2 * .9.
    vs, _ = run(vtrace, GOLDENS["on_policy"][0])
    np.testing.assert_allclose(vs[:, 0], [8.146 - 1.458, 7.94 - 1.62, 6.6 - 1.8])


def test_a7_padding_between_episodes() -> None:
    # ray#14128: short episodes padded to one length and laid end to end.
    # v0 = 1 (terminated); v2 = 2 + .9 * 4 (truncated before padding).
    case = column(
        rho=[1, 1, 1, 1],
        reward=[1, 7, 2, 7],
        value=[0, 7, 0, 7],
        bootstrap=7,
        terminated=[0],
        final_values={2: 4},
        invalid=[1, 3],
    )
    assert_column(run(vtrace, case), [1, 0, 5.6, 0], [1, 0, 5.6, 0])


def test_a8_truncation_is_neither_nothing_nor_an_end() -> None:
    # gamma .5, r = 1, V = 0 but V(final observation) = 6. v1 = 1 + .5 * 6, v0 = 1 + .5 * 4.
    # As no boundary v1 = 1 + .5 * 1, v0 = 1.75; as termination v1 = 1, v0 = 1.5.
    case = column(
        rho=[1] * 3, gamma=0.5, reward=[1] * 3, value=[0] * 3, bootstrap=0, final_values={1: 6}
    )
    assert_column(run(vtrace, case), [3, 4, 1], [3, 4, 1])


def test_a9_bootstraps_from_the_final_observation() -> None:
    # Not from the state before it, V = 3: Sample Factory's learner gives 1 + .9 * 3 = 3.7.
    # v0 = 1 + .9 * 5.
    case = column(rho=[1, 1], reward=[1, 0], value=[3, 0], bootstrap=0, final_values={0: 5})
    assert_column(run(vtrace, case), [5.5, 0], [2.5, 0])


def test_a10_the_weight_enters_once() -> None:
    # Sample Factory clamps the ratio to [.05, 20] first, and multiplies it in again afterwards.
    # adv = .01 * (1 + .9 * 10 - 0), and v = 0 + .01 * 10.
    case = column(rho=[0.01], reward=[1], value=[0], bootstrap=10)
    assert_column(run(vtrace, case), [0.1], [0.1])


def test_a15_arguments_are_left_alone() -> None:
    # open_spiel#963: the targets were written over between calls.
    def copies(arguments: dict[str, Any]) -> list[Array]:
        return [x.numpy().copy() for x in arguments.values() if isinstance(x, tf.Tensor)]

    arguments = BATTERY[0].arguments()
    before = copies(arguments)
    first = vtrace(**arguments)
    first_vs = first.vs.numpy().copy()
    second = vtrace(**arguments)
    for x, y in zip(before, copies(arguments), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(first_vs, second.vs)
    np.testing.assert_array_equal(first.vs, first_vs)


def test_a16_the_order_of_steps_matters() -> None:
    # XLRON#50 shuffled before the scan. v1 = 4, v0 = .9 * 4; the other way 0, 4.
    case = column(rho=[1, 1], reward=[0, 4], value=[0, 0], bootstrap=0)
    assert_column(run(vtrace, case), [3.6, 4], [3.6, 4])
    assert_column(run(vtrace, replace(case, rewards=case.rewards[::-1])), [4, 0], [4, 0])


def test_a17_last_step_is_one_step_td() -> None:
    # rlax#140 held that it is not. adv1 = 3 + .9 * 2 - 1.
    case = column(rho=[1, 1], reward=[0, 3], value=[0, 1], bootstrap=2)
    assert run(vtrace, case)[1][1, 0] == pytest.approx(3.8)
