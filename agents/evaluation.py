"""Plays episodes with a fixed policy."""

from headrace.agents.acting import Policy
from headrace.agents.environments import Environment
from headrace.agents.types import Episode


def evaluate(policy: Policy, environment: Environment, episodes_per_env: int) -> list[Episode]:
    """Plays the first `episodes_per_env` episodes of each environment.

    As many from each, since the first to finish anywhere are the short ones.

    Args:
      policy: with its weights set.
      environment: E environments; they are reset first.
      episodes_per_env: number of episodes of each.

    Returns:
      E * episodes_per_env episodes.
    """
    played: list[list[Episode]] = [[] for _ in range(environment.num_envs)]
    returns, lengths = [0.0] * environment.num_envs, [0] * environment.num_envs
    observation = environment.reset()
    while any(len(episodes) < episodes_per_env for episodes in played):
        step = environment.step(policy(observation).action)
        observation = step.observation
        for i, episodes in enumerate(played):
            returns[i] += float(step.reward[i])
            lengths[i] += int(step.valid[i])
            if step.terminated[i] or step.truncated[i]:
                if len(episodes) < episodes_per_env:
                    episodes.append(Episode(returns[i], lengths[i]))
                returns[i], lengths[i] = 0.0, 0
    return [episode for episodes in played for episode in episodes]
