"""Linking: a share of the windows' tokens is encoded again, with sight of the windows before."""
