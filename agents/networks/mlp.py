"""A multi-layer perceptron with a policy and a value head."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from headrace.agents.networks.base import Shape
from headrace.agents.spaces import encode, encoded_size
from headrace.agents.types import Array


@dataclasses.dataclass(frozen=True)
class MLP:
    """ReLU layers shared by a linear policy head and a linear value head.

    Observations are made flat by `spaces.encode`.

    Attributes:
      observation_spec: nest of the specs of one observation.
      num_actions: A.
      hidden_sizes: units of each shared layer.
    """

    observation_spec: Any
    num_actions: int
    hidden_sizes: Sequence[int]

    @property
    def shapes(self) -> list[Shape]:
        """Kernel and bias of each shared layer, then of the policy head, then of the value head."""
        widths = [encoded_size(self.observation_spec), *self.hidden_sizes]
        layers = [*itertools.pairwise(widths)]
        layers += [(widths[-1], self.num_actions), (widths[-1], 1)]
        return [shape for rows, columns in layers for shape in ((rows, columns), (columns,))]

    def init(self, rng: np.random.Generator) -> list[Array]:
        """Orthogonal kernels (Saxe et al. 2014) and zero biases.

        The gain is sqrt(2) for ReLU layers, 0.01 for the policy head, so that the first policy is
        near uniform, and 1 for the value head.
        """
        gains = [math.sqrt(2.0)] * len(self.hidden_sizes) + [0.01, 1.0]
        params: list[Array] = []
        for shape, gain in zip(self.shapes[::2], gains, strict=True):
            params.append((gain * _orthogonal(shape, rng)).astype(np.float32))
            params.append(np.zeros(shape[1], np.float32))
        return params

    def policy(self, params: Sequence[Any], observation: Any, xp: ModuleType) -> Any:
        """See `Network.policy`."""
        hidden = self._torso(params, observation, xp)
        return xp.matmul(hidden, params[-4]) + params[-3]

    def policy_and_value(
        self, params: Sequence[Any], observation: Any, xp: ModuleType
    ) -> tuple[Any, Any]:
        """See `Network.policy_and_value`."""
        hidden = self._torso(params, observation, xp)
        logits = xp.matmul(hidden, params[-4]) + params[-3]
        value = xp.matmul(hidden, params[-2]) + params[-1]
        return logits, value[:, 0]

    def _torso(self, params: Sequence[Any], observation: Any, xp: ModuleType) -> Any:
        x = encode(observation, self.observation_spec, xp)
        for kernel, bias in zip(params[:-4:2], params[1:-4:2], strict=True):
            x = xp.maximum(xp.matmul(x, kernel) + bias, np.float32(0))
        return x


def _orthogonal(shape: Shape, rng: np.random.Generator) -> Array:
    rows, columns = shape
    q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    # QR leaves the signs of R's diagonal open; fixing them makes Q uniform.
    q *= np.sign(np.diag(r))
    orthogonal: Array = q if rows >= columns else q.T
    return orthogonal
