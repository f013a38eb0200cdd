"""Encoded passages that are kept, searched by their keys and read a few at a time."""
