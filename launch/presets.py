"""Tuned settings by name."""

import dataclasses

from headrace.agents.impala.config import IMPALAConfig
from headrace.launch.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """Tuned settings.

    Attributes:
      description: what they are for.
      run: settings of the run.
      agent: settings of the agent.
    """

    description: str
    run: RunConfig
    agent: IMPALAConfig


# Returns of 500 times 0.05 keep the value loss near the policy loss in size, and the small
# gradient norm keeps a policy that balances from being unlearnt.
_CARTPOLE = IMPALAConfig(
    batch_size=32,
    learning_rate=2e-3,
    reward_scale=0.05,
    max_gradient_norm=0.3,
)

PRESETS = {
    "cartpole": Preset(
        "CartPole-v1 to a mean return of 475, in seconds",
        RunConfig(envs_per_actor=16, target_return=475.0, max_env_steps=3_000_000),
        _CARTPOLE,
    ),
    "cartpole-throughput": Preset(
        "CartPole-v1 with the most env steps per second",
        RunConfig(envs_per_actor=256, time_limit=60.0),
        # The learner is the bottleneck, so a longer queue would only be staler. Adam's larger steps
        # unlearn the task within a minute.
        dataclasses.replace(
            _CARTPOLE,
            batch_size=256,
            learner_queue_size=1,
            max_in_flight_items=1,
            learning_rate=1e-3,
            epsilon=1e-3,
        ),
    ),
    "cartpole-python-envs": Preset(
        "the work of cartpole on Python environments, stepped one by one",
        RunConfig(
            envs_per_actor=16,
            vectorization="sync",
            target_return=475.0,
            max_env_steps=3_000_000,
        ),
        _CARTPOLE,
    ),
}
