"""Agents: what is learned, and from what. Knows nothing of processes."""
