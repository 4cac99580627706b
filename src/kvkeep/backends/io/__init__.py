"""What the tiers on slow media share: threads with queues, and a breaker."""
