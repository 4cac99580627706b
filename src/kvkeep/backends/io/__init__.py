"""What the tiers on slow media share: threads with queues, a breaker, and how data is cut."""
