"""Encoded passages that are stored, searched by their keys and read a few at a time."""
