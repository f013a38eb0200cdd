"""Builders of small tokenizers, a file for each kind."""
