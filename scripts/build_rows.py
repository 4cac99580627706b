"""Builds the compiled copies (``src/kvkeep/gpu/_rows.c``) into the package, beside their source.

Installing kvkeep does it (``hatch_build.py``); by hand after a change of the source:
``python scripts/build_rows.py``. The compiler is ``$CC``, or the first there is of ``cc``, ``gcc``
and ``clang``. Exit code 1 if there is none: kvkeep works without, and copies with numpy.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvkeep" / "gpu" / "_rows.c"
LIBRARY = SOURCE.with_suffix(".native.so")
FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-fPIC", "-shared")
#: A compiler that takes longer is not waited for.
DEADLINE_S = 120.0


class BuildError(Exception):
    """Nothing was built; says why."""


def compiler() -> list[str]:
    """The command that compiles C.

    Raises:
        BuildError: there is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"there is no C compiler ({' '.join(chosen) or 'cc, gcc or clang'})")


def build(library: Path = LIBRARY, *, options: Sequence[str] = ()) -> None:
    """Compile the library; one that is in use stays whole for who uses it.

    Args:
        library: what to write.
        options: of the compiler, for tests: ``-DONLY_PLAIN`` as on other architectures than x86-64,
            ``-DHAS_AVX2=0`` as on older processors.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    made = library.with_name(f"{library.name}.{os.getpid()}")
    command = [*compiler(), *FLAGS, *options, "-o", str(made), str(SOURCE)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr}")
        made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)}: {error}") from error
    finally:
        made.unlink(missing_ok=True)


def main() -> int:
    """Build in place."""
    try:
        build()
    except BuildError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    print(LIBRARY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
