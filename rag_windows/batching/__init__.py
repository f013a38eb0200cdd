"""Many questions at once: one forward pass a token for all, one copy of what they share."""
