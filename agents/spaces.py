"""Observation spaces: what a Gymnasium space looks like to an agent, and to a network.

An observation is a nest (of dicts and tuples, as its space) of arrays. Its spec is the same nest
of `acme.specs`: an `Array` holds numbers; a `BoundedArray` of integers holds categories, each
element counted from 0 to its maximum.
"""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import tree
from acme import specs

from headrace.agents.types import Array


class UnsupportedSpaceError(TypeError):
    """A space that no agent here can observe."""


def observation_spec(space: gym.Space[Any]) -> Any:
    """The nest of specs of a space.

    float64 becomes float32, and `Discrete` and `MultiDiscrete` are counted from 0.

    Raises:
      UnsupportedSpaceError: the space, or one in it, is none of Box, Discrete, MultiDiscrete,
        MultiBinary, Dict and Tuple.
    """
    if isinstance(space, gym.spaces.Dict):
        return {key: observation_spec(part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(observation_spec(part) for part in space.spaces)
    if isinstance(space, gym.spaces.Box):
        dtype = np.float32 if space.dtype == np.float64 else space.dtype
        return specs.Array(space.shape, dtype, name="observation")
    if isinstance(space, gym.spaces.Discrete):
        return specs.DiscreteArray(int(space.n), dtype=np.int64, name="observation")
    if isinstance(space, gym.spaces.MultiDiscrete):
        return specs.BoundedArray(space.shape, np.int64, 0, space.nvec - 1, name="observation")
    if isinstance(space, gym.spaces.MultiBinary):
        return specs.BoundedArray(space.shape, np.int8, 0, 1, name="observation")
    raise UnsupportedSpaceError(str(space))


class ObservationReader:
    """Turns observations of a space, [E, ...], into what its spec says.

    Args:
      space: of one environment.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._spec = observation_spec(space)
        self._leaves = [
            (spec.dtype, start)
            for spec, start in zip(tree.flatten(self._spec), _starts(space), strict=True)
        ]

    def __call__(self, observation: Any) -> Any:
        """Reads an observation; where nothing has to change, arrays are passed on, not copied."""
        if isinstance(self._spec, specs.Array):  # Walking through a nest costs as much as acting.
            return _read_leaf(observation, *self._leaves[0])
        parts = [
            _read_leaf(part, *leaf)
            for part, leaf in zip(tree.flatten(observation), self._leaves, strict=True)
        ]
        return tree.unflatten_as(self._spec, parts)


def _read_leaf(x: Any, dtype: Any, start: Any) -> Array:
    return np.asarray(x if start is None else x - start, dtype)


def _starts(space: gym.Space[Any]) -> list[Any]:
    """What to subtract from each leaf of a space, or None, in the order of `tree.flatten`."""
    if isinstance(space, gym.spaces.Dict):
        return [start for key in sorted(space.spaces) for start in _starts(space.spaces[key])]
    if isinstance(space, gym.spaces.Tuple):
        return [start for part in space.spaces for start in _starts(part)]
    start: Any = getattr(space, "start", 0)
    return [start if np.any(start) else None]


def encoded_size(spec: Any) -> int:
    """Numbers in an observation that `encode` has made flat."""
    return sum(sum(_sizes(leaf)) for leaf in tree.flatten(spec))


def encode(observation: Any, spec: Any, xp: ModuleType) -> Any:
    """Makes observations flat, for a network of dense layers.

    Numbers are cast to float32, uint8 ones scaled to [0, 1]. A category of two values is 0 or 1,
    one of more is one-hot.

    Args:
      observation: nest of [N, ...] arrays or tensors.
      spec: nest of the specs of one observation.
      xp: `numpy` or `tensorflow`.

    Returns:
      [N, encoded_size(spec)] float32, the leaves side by side in the order of `tree.flatten`.
    """
    if isinstance(spec, specs.Array):
        return _encode_leaf(observation, spec, xp)
    leaves = zip(tree.flatten(observation), tree.flatten(spec), strict=True)
    parts = [_encode_leaf(part, leaf, xp) for part, leaf in leaves]
    return np.concatenate(parts, axis=1) if xp is np else xp.concat(parts, axis=1)


def _sizes(spec: specs.Array) -> Sequence[int]:
    """Numbers in which each element of a leaf is encoded."""
    if not isinstance(spec, specs.BoundedArray):
        return [1] * math.prod(spec.shape)
    values = np.broadcast_to(spec.maximum, spec.shape).ravel() + 1
    return [1 if n <= 2 else int(n) for n in values]


def _encode_leaf(x: Any, spec: specs.Array, xp: ModuleType) -> Any:
    x = xp.reshape(x, (-1, math.prod(spec.shape)))
    sizes = _sizes(spec) if isinstance(spec, specs.BoundedArray) else ()
    if sum(sizes) == len(sizes):
        if x.dtype == xp.uint8:
            return _to_float32(x, xp) * np.float32(1 / 255)
        return x if x.dtype == xp.float32 else _to_float32(x, xp)
    # Each element against its values 0, 1, ..., or against 1 alone.
    elements = np.repeat(np.arange(len(sizes)), sizes)
    values = np.concatenate([[1] if n == 1 else np.arange(n) for n in sizes]).astype(x.dtype.name)
    repeated = x[:, elements] if xp is np else xp.gather(x, elements, axis=1)
    return _to_float32(xp.equal(repeated, values), xp)


def _to_float32(x: Any, xp: ModuleType) -> Array:
    cast: Array = x.astype(np.float32) if xp is np else xp.cast(x, xp.float32)
    return cast
