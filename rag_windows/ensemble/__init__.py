"""Windows that answer each for itself, and what makes one answer of theirs."""
