"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561)."""

from headrace.agents.impala.builder import IMPALABuilder
from headrace.agents.impala.config import IMPALAConfig

__all__ = ["IMPALABuilder", "IMPALAConfig"]
