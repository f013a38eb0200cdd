"""Tests of windows that answer each for itself."""
