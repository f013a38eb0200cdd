"""The guard: answers in the ordinary way where windows are likely to lose, and says so."""
