"""Cache policies: in which order chunks are evicted."""
