"""The command line, ``kvkeep``."""
