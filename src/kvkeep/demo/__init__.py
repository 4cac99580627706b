"""The demo: one long document, several questions, asked cold and with the cache."""
