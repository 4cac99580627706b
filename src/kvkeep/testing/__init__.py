"""Contract tests and faulty stand-ins, shipped for authors of backends and policies."""
