"""Records that cross a process boundary.

Shapes use T for the unroll length, E for the environments stepped together, B for the
unrolls of a train batch. All arrays are time-major.
"""

from typing import Any, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]


class Unroll(NamedTuple):
    """T steps of E environments under one behaviour policy: what the queue holds.

    Row t of a column is one transition: `action[t]` was chosen on `observation[t]` and led to
    `reward[t]`. The successor is `observation[t + 1]`, except where an episode ended and the
    environment resets within the step: there it is `final_observation[t]`.

    Attributes:
      observation: nest of [T+1, E, ...], of the dtypes in the environment's spec. Row T is the
        bootstrap observation and row 0 of the same environments' next unroll.
      action: [T, E] int64, counted from 0 (the environment's own `start` is added when acting).
      reward: [T, E] float32, as the environment gave it.
      terminated: [T, E] bool, the episode ended and nothing follows: discount 0.
      truncated: [T, E] bool, the episode was cut short: bootstrap from the final observation.
      valid: [T, E] bool, False on the reset transition of a NEXT_STEP vector environment, whose
        action was ignored. Such rows enter no loss and no count.
      behaviour_log_prob: [T, E] float32, log mu(action | observation) when acting.
      final_observation: nest of [T, E, ...] like observation, meaningful where an episode ended. It
        is the empty tuple for NEXT_STEP environments, which show it as `observation[t + 1]`.
      weights_version: [] int64, version of the behaviour policy's weights.
      actor_id: [] int64.
      sequence: [] int64, position among the items that this actor wrote, from 0.
    """

    observation: Any
    action: Any
    reward: Any
    terminated: Any
    truncated: Any
    valid: Any
    behaviour_log_prob: Any
    final_observation: Any
    weights_version: Any
    actor_id: Any
    sequence: Any


class TrainBatch(NamedTuple):
    """What the learner takes one step on.

    Attributes:
      unrolls: an `Unroll` of queue items, each field [items, ...].
      replayed: [items] bool, the item came from the replay table, so it was in a batch before.
    """

    unrolls: Unroll
    replayed: Any


class Weights(NamedTuple):
    """An immutable snapshot of a network's parameters.

    Attributes:
      version: learner steps done when the snapshot was taken.
      flat: [P] float32, all parameters in the network's order.
    """

    version: int
    flat: Array


class Episode(NamedTuple):
    """A finished episode, with the environment's own rewards.

    Attributes:
      episode_return: undiscounted sum of rewards.
      length: env steps.
    """

    episode_return: float
    length: int


class ConfigError(Exception):
    """A setting has a value that cannot work.

    The text names the setting, the value and what would be right.
    """

    def __init__(self, setting: str, value: object, expected: str) -> None:
        super().__init__(f"{setting} = {value!r}: {expected}")
        self.setting = setting
        self.value = value
        self.expected = expected


class Stopped(Exception):  # noqa: N818  # not an error: the run ends
    """The run is being stopped. Raised by whatever would otherwise go on waiting."""
