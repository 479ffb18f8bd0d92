"""Optimisers whose learning rate may change from step to step."""

from collections.abc import Sequence
from typing import Any

import sonnet as snt
import tensorflow as tf


def make_adam(params: Sequence[tf.Variable], epsilon: float) -> Any:
    """Adam (Kingma and Ba 2015), epsilon outside the root.

    The learning rate is the variable `learning_rate` of the result, 0 until it is assigned.
    """
    optimizer = snt.optimizers.Adam(_learning_rate(), epsilon=epsilon)
    _make_variables(optimizer, params)
    return optimizer


def make_rmsprop(
    params: Sequence[tf.Variable], epsilon: float, decay: float, momentum: float
) -> Any:
    """RMSProp as in TensorFlow 1, with which IMPALA was published.

    Epsilon stands inside the root, and the mean square starts at 1, so the first steps are of the
    gradient's size. The learning rate is the variable `learning_rate` of the result, 0 until it is
    assigned.
    """
    optimizer = snt.optimizers.RMSProp(
        _learning_rate(), decay=decay, momentum=momentum, epsilon=epsilon
    )
    _make_variables(optimizer, params)
    for mean_square in optimizer.ms:
        mean_square.assign(tf.ones_like(mean_square))
    return optimizer


def _learning_rate() -> tf.Variable:
    return tf.Variable(0.0, trainable=False, name="learning_rate")


def _make_variables(optimizer: Any, params: Sequence[tf.Variable]) -> None:
    """Makes the optimiser's variables with a step of nothing.

    Sonnet would make them in the first `apply`, which tf.function cannot lift out of its graph when
    it is traced outside the main thread.
    """
    optimizer.apply([tf.zeros_like(p) for p in params], params)
    for variable in optimizer.variables:
        variable.assign(tf.zeros_like(variable))
