"""Symmetric memory: groups, transports, the workspace, and the host's side of signals."""
