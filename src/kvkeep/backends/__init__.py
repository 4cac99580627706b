"""Storage backends: one tier each."""
