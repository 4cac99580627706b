"""The parts of the disk tier: system calls, ledger, directory, index, I/O threads, loads, stores.

Used by :mod:`kvkeep.backends.disk.backend` alone, which puts them together. ``docs/disk.md``
describes the directory byte by byte; ``docs/adr/0010-disk-layout.md`` says why it looks like this.
"""
