"""Intervals and tests for what was measured on the same questions with several methods."""
