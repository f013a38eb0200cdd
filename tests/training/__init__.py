"""Tests of the trainer of the embedded reader."""
