"""Launching: who runs where. Knows agents only through `headrace.agents.builder`."""
