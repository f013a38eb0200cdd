"""The passage cache: keys and values of windows in memory and on disk."""
