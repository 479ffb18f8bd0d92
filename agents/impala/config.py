"""Settings of IMPALA."""

import dataclasses
import math
from typing import Literal

from headrace.agents.schedules import Points, check_points
from headrace.agents.types import ConfigError


@dataclasses.dataclass(frozen=True)
class IMPALAConfig:
    """Settings of IMPALA.

    Raises:
      ConfigError: a value is out of its range.
    """

    unroll_length: int = 20
    """T, env steps per environment in one unroll."""
    batch_size: int = 32
    """B, unrolls in one train batch. Must divide or be a multiple of the environments per actor."""
    learner_queue_size: int = 2
    """Train batches that the queue holds, beside the one that is on its way to the learner; a full
    queue blocks the actors. More is staler."""
    learner_queue_timeout_s: float | None = 300.0
    """Longest wait of the learner for a train batch; None: for ever."""
    learner_queue_timeout_action: Literal["warn", "fail"] = "warn"
    """What is done then: count it, say so in the learner's log and go on, or end the run with an
    error."""
    max_in_flight_items: int = 2
    """Queue items that an actor may have written before the queue has confirmed them."""
    broadcast_interval: int = 1
    """Learner steps between two publications of weights."""
    update_period: int = 1
    """Unrolls that an actor makes between two fetches of weights."""

    replay_proportion: float = 0.0
    """Replayed queue items for each new one, on average; a train batch holds both. An item holds
    the unrolls of one actor's environments, as far as they fit a batch."""
    replay_slots: int = 0
    """Newest queue items that the replay table holds, from which each is as likely as another."""
    max_policy_lag: int | None = None
    """Most learner steps between acting on an unroll and its arrival at the learner, anew or from
    the replay table; None: no limit. Passes after the first come on top."""
    too_old: Literal["drop", "train"] = "drop"
    """What is done with unrolls beyond max_policy_lag. They are counted either way."""
    num_sgd_iter: int = 1
    """Learner steps on each train batch. All count in the env steps trained."""
    minibatch_buffer_size: int = 1
    """Train batches that the learner holds to take steps on in turn. More than 1 is of use if
    num_sgd_iter is too."""
    warm_start_passes: bool = False
    """Take one step on the first train batch, two on the second, up to num_sgd_iter, so that the
    batches held are not all replaced at once."""

    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer."""
    discount: float = 0.99
    """Discount factor per env step, gamma."""
    reward_clip: Literal["none", "sign", "range"] = "none"
    """Before rewards are scaled: sign makes them -1, 0 or 1; range cuts them to [-1, 1]. Reported
    returns are not clipped."""
    reward_scale: float = 1.0
    """Factor on rewards in the loss, best such that returns are of the order of 10. Reported
    returns are not scaled."""
    vtrace: bool = True
    """Correct for the policy lag with V-trace. Else the loss is that of A3C, with advantages from
    generalised advantage estimation, and the clips below are not used."""
    rho_bar: float | None = 1.0
    """Clip of the importance weights in the value target; None: no clip."""
    c_bar: float = 1.0
    """Clip of the importance weights in the trace; at most rho_bar."""
    pg_rho_bar: float | None = 1.0
    """Clip of the importance weights in the policy gradient; None: no clip."""
    trace_decay: float = 1.0
    """Lambda of V-trace and of generalised advantage estimation: 1 is the full trace, 0 one-step
    targets."""
    baseline_cost: float = 0.5
    """Weight of the value loss, 0.5 (vs - V)^2."""
    entropy_cost: float = 0.01
    """Weight of the entropy bonus."""
    entropy_cost_schedule: Points = ()
    """Weight of the entropy bonus as env steps trained and value, in pairs: 0 0.01 1000000 0.
    Linear between them. Replaces entropy_cost."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """Over the steps of a batch. The paper sums, so its gradients grow with the batch."""

    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Optimiser."""
    learning_rate: float = 6e-4
    """Step size of the optimiser."""
    learning_rate_schedule: Points = ()
    """Step size as env steps trained and value, in pairs: 0 6e-4 1000000 0. Linear between them.
    Replaces learning_rate."""
    separate_value_optimizer: bool = False
    """Minimise the value loss with an Adam of its own, whose gradients are clipped on their own."""
    value_learning_rate: float = 5e-4
    """Step size of the separate value optimiser."""
    epsilon: float = 1e-5
    """Added to the optimiser's divisor: outside the root for adam, inside for rmsprop."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp's mean square."""
    rmsprop_momentum: float = 0.0
    """Momentum of RMSProp."""
    max_gradient_norm: float | None = 0.5
    """Global norm to which gradients are clipped; None: no clip. The paper clips at 40, but sums
    its loss."""
    average_steps: int = 30
    """Learner steps over which the final weights are averaged, with weights that decay: one step
    can undo for a moment what was learnt. 1 is no average. Actors get the newest weights."""
    jit_compile: bool = True
    """Compile the learner step with XLA: faster for MLPs, slower for convolutions on a CPU."""

    def __post_init__(self) -> None:
        for name in (
            "unroll_length",
            "batch_size",
            "learner_queue_size",
            "max_in_flight_items",
            "broadcast_interval",
            "update_period",
            "num_sgd_iter",
            "minibatch_buffer_size",
            "average_steps",
        ):
            _check(self, name, getattr(self, name) >= 1, "must be at least 1")
        _check(self, "replay_slots", self.replay_slots >= 0, "must be 0 or more")
        lag, timeout = self.max_policy_lag, self.learner_queue_timeout_s
        _check(self, "max_policy_lag", lag is None or lag >= 0, "must be 0 or more, or None")
        _check(
            self,
            "learner_queue_timeout_s",
            timeout is None or 0 < timeout < math.inf,
            "must be finite and above 0 s, or None",
        )
        _check(
            self,
            "learner_queue_timeout_action",
            self.learner_queue_timeout_action in ("warn", "fail"),
            "warn or fail",
        )
        _check(self, "too_old", self.too_old in ("drop", "train"), "drop or train")
        for name in ("learning_rate", "value_learning_rate", "epsilon"):
            _check(self, name, 0 < getattr(self, name) < math.inf, "must be finite and above 0")
        for name in ("rho_bar", "pg_rho_bar", "max_gradient_norm"):
            value = getattr(self, name)
            holds = value is None or 0 < value < math.inf
            _check(self, name, holds, "must be finite and above 0, or None for no clip")
        for name in ("baseline_cost", "entropy_cost", "reward_scale", "replay_proportion"):
            _check(self, name, 0 <= getattr(self, name) < math.inf, "must be finite, 0 or more")
        for name in ("discount", "trace_decay"):
            _check(self, name, 0 <= getattr(self, name) <= 1, "must lie in [0, 1]")
        for name in ("rmsprop_decay", "rmsprop_momentum"):
            _check(self, name, 0 <= getattr(self, name) < 1, "must lie in [0, 1)")
        _check(self, "c_bar", 0 <= self.c_bar < math.inf, "must be finite, 0 or more")
        if self.rho_bar is not None:
            _check(self, "c_bar", self.c_bar <= self.rho_bar, "must lie in [0, rho_bar]")
        for name in ("learning_rate_schedule", "entropy_cost_schedule"):
            check_points(name, getattr(self, name))
        _check(
            self,
            "hidden_sizes",
            len(self.hidden_sizes) > 0 and min(self.hidden_sizes) >= 1,
            "must name at least one layer, each of 1 unit or more",
        )
        if self.replay_proportion:
            _check(self, "replay_slots", self.replay_slots > 0, "must be above 0, to have replay")
        clips = ("none", "sign", "range")
        _check(self, "reward_clip", self.reward_clip in clips, "none, sign or range")
        _check(self, "loss_reduction", self.loss_reduction in ("mean", "sum"), "mean or sum")
        _check(self, "optimizer", self.optimizer in ("adam", "rmsprop"), "adam or rmsprop")


def _check(config: IMPALAConfig, name: str, holds: bool, expected: str) -> None:
    # Conditions are written so that NaN fails them.
    if not holds:
        raise ConfigError(name, getattr(config, name), expected)
