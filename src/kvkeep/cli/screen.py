"""The screen while an engine that writes to it as it likes runs in this process and below it.

vLLM and its processes write their own lines to the terminal. They go to a file meanwhile, whose
end is shown if something fails; only what is written to the given console is seen. For commands
that own their process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from rich.console import Console

#: Bytes of the engine's output that are shown when it failed.
TAIL_BYTES = 3_000


@contextlib.contextmanager
def quiet_screen() -> Iterator[Console]:
    """Send what this process and its children write into a file; the console still writes.

    Standard output and standard error are restored at the end; if the block raises, the end of what
    was written is printed first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as log, os.fdopen(os.dup(2), "w") as screen:
        try:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            yield Console(file=screen)
        except BaseException:
            sys.stdout.flush()
            sys.stderr.flush()
            screen.write(_tail(log))
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, old in zip((1, 2), saved, strict=True):
                os.dup2(old, descriptor)
                os.close(old)


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    return log.read().decode("utf-8", "replace")
