"""Attention over windows: the hook, what travels with a call, backends, and what is refused."""
