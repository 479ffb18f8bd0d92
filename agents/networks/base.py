"""What an agent asks of a network."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from headrace.agents.types import Array

Shape = tuple[int, ...]


class Network(Protocol):
    """A policy and a value function over explicit parameters.

    The forward passes take the array module to compute with, `numpy` or `tensorflow`, and use
    only functions that both have. So the behaviour policy and the learner run the same lines,
    and no actor needs a TensorFlow call per step.
    """

    @property
    def shapes(self) -> Sequence[Shape]:
        """Shape of each parameter, in order."""

    def init(self, rng: np.random.Generator) -> list[Array]:
        """Draws initial parameters, float32, in the order of `shapes`."""

    def policy(self, params: Sequence[Any], observation: Any, xp: ModuleType) -> Any:
        """Logits [N, A] float32 of the action distribution for observations, a nest of [N, ...]."""

    def policy_and_value(
        self, params: Sequence[Any], observation: Any, xp: ModuleType
    ) -> tuple[Any, Any]:
        """Logits [N, A] and values [N], float32, for observations, a nest of [N, ...]."""


def flatten(params: Sequence[Array]) -> Array:
    """Concatenates parameters to one [P] float32 vector, the form in which they travel."""
    return np.concatenate([np.asarray(p, np.float32).ravel() for p in params])


def unflatten(flat: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Splits a [P] vector into views with the given shapes.

    Raises:
      ValueError: the vector has another length than the shapes need.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if flat.shape != (sum(sizes),):
        raise ValueError(f"weights have shape {flat.shape}, the network needs ({sum(sizes)},)")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
