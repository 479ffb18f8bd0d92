"""Networks: one definition, run by TensorFlow in the learner and by NumPy in the actors."""

from headrace.agents.networks.base import Network, flatten, unflatten
from headrace.agents.networks.mlp import MLP

__all__ = ["MLP", "Network", "flatten", "unflatten"]
