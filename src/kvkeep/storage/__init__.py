"""The tiers as one hierarchy."""
