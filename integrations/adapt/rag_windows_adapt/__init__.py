"""Teaches a local model to read windows side by side, from its own answers."""
