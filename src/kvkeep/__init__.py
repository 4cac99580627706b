"""Keeps the KV caches that an LLM engine has computed, so that a prompt is prefilled once."""

__version__ = "0.1.0"
