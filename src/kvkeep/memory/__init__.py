"""Pool memory: the arena, the allocators that cut it, and the memory objects that they hand out."""
