"""Support for tests."""
