"""Installs the servers that the tests start and that are no Python packages.

Redis, Prometheus, and the system libraries that Mooncake Store's programs need. What the system has
is used as it is. What it lacks is unpacked from Debian's packages below a folder, which needs no
rights (``apt-get download`` and ``dpkg -x``); where that fails, the super-user gets it installed
(``apt-get install``). The tests look in the same folder.

Use: ``python scripts/install_servers.py FOLDER``; exit code 1 and what is missing if it fails.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

#: What is needed: a program on PATH or a shared library, and the packages that bring it.
PROGRAMS = {
    "redis-server": "redis-server",
    "redis-cli": "redis-tools",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
#: Packages that every system has, and what only sets up a service of the system.
NOT_FOLLOWED = frozenset({"libc6", "adduser", "init-system-helpers", "lsb-base", "sysvinit-utils"})
#: How the names of packages start that only the pages of a server need.
PAGES = ("libjs-", "fonts-")
TIMEOUT_S = 600


def missing(folder: Path) -> list[str]:
    """Packages of what neither the system nor the folder has."""
    path = f"{os.environ.get('PATH', '')}:{folder / 'usr' / 'bin'}"
    packages = {
        package for name, package in PROGRAMS.items() if shutil.which(name, path=path) is None
    }
    return sorted(packages) + [
        package for name, package in LIBRARIES.items() if not has_library(name, folder)
    ]


def has_library(name: str, folder: Path) -> bool:
    """The loader finds a library, or it is below the folder."""
    if any(folder.rglob(name)):
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def run(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; the caller looks at its exit code."""
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )


def with_dependencies(packages: Iterable[str]) -> list[str]:
    """The packages and those that they need, without those that the system has anyway."""
    wanted: dict[str, None] = {}
    rest = list(packages)
    while rest:
        package = rest.pop()
        if package in wanted or package in NOT_FOLLOWED or package.startswith(PAGES):
            continue
        if package not in packages and is_installed(package):
            continue
        wanted[package] = None
        listed = run(["apt-cache", "depends", "--no-recommends", "--no-suggests", package]).stdout
        lines = [line.strip() for line in listed.splitlines()]
        rest += [line.removeprefix("Depends: ") for line in lines if line.startswith("Depends: ")]
    return [package for package in wanted if not package.startswith("<")]


def is_installed(package: str) -> bool:
    """The system has this package."""
    return "ok installed" in run(["dpkg-query", "-W", "-f=${Status}", package]).stdout


def unpack(packages: Sequence[str], folder: Path) -> str:
    """Download packages and unpack them below the folder; what went wrong, or nothing."""
    archives = folder / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    done = run(["apt-get", "download", *with_dependencies(packages)], archives)
    if done.returncode:
        return done.stderr
    for archive in archives.glob("*.deb"):
        done = run(["dpkg", "-x", str(archive), str(folder)])
        if done.returncode:
            return done.stderr
    shutil.rmtree(archives)
    return ""


def main(arguments: list[str]) -> int:
    """Install what is missing below the folder given."""
    folder = Path(arguments[0]).absolute()
    wanted = missing(folder)
    if not wanted:
        return 0
    if shutil.which("apt-get") is None:
        print(f"this system has no apt-get; install by hand: {', '.join(wanted)}")
        return 1
    is_root = os.geteuid() == 0
    if is_root:
        run(["apt-get", "update", "-qq"])
    problem = unpack(wanted, folder)
    if missing(folder) and is_root:
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted])
    still = missing(folder)
    if still:
        print(f"cannot install {', '.join(still)}:\n{problem}")
    return 1 if still else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
