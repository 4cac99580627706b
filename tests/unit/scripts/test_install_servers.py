"""The servers of the tests are unpacked from packages: here from a made-up archive, offline.

apt, dpkg and the archive are real; only what is in its packages is made up.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.debian

SCRIPT = Path(__file__).parents[3] / "scripts" / "install_servers.py"
#: Packages of the archive: what each depends on, and the files that it brings.
ARCHIVE = {
    "kvkeep-server": ("kvkeep-library, libc6, fonts-kvkeep, kvkeep-own", ["usr/bin/kvkeep-served"]),
    "kvkeep-library": ("kvkeep-deeper", ["usr/lib/libkvkeep.so.1"]),
    "kvkeep-deeper": ("", ["usr/lib/deeper"]),
    "fonts-kvkeep": ("", ["usr/share/fonts/kvkeep"]),
    "kvkeep-own": ("", ["usr/share/own"]),
    "kvkeep-unasked": ("", ["usr/share/unasked"]),
}


@pytest.fixture
def servers():
    """The script as a module of its own."""
    spec = importlib.util.spec_from_file_location("install_servers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, name: str, depends: str, files: list[str]) -> str:
    """A package in a folder; its part of the archive's index."""
    tree = folder / name
    control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody\n"
    control += f"Depends: {depends}\n" if depends else ""
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(f"{control}Description: made up\n")
    for file in files:
        path = tree / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    package = folder / f"{name}_1_all.deb"
    command = ["dpkg-deb", "--build", "--root-owner-group", str(tree), str(package)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    data = package.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return f"{control}Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {digest}\n"


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """apt knows this archive and no other, and writes to no place of the system's."""
    packages, state = tmp_path / "packages", tmp_path / "state"
    packages.mkdir()
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True)
    index = [build(packages, name, *content) for name, content in ARCHIVE.items()]
    (packages / "Packages").write_text("\n".join(index))
    (state / "sources.list").write_text(f"deb [trusted=yes] file:{packages} ./\n")
    (state / "status").write_text("")
    (state / "apt.conf").write_text(
        f'Dir::State "{state}";\nDir::State::lists "{state}/lists";\n'
        f'Dir::State::status "{state}/status";\nDir::Cache "{state}/cache";\n'
        f'Dir::Etc::sourcelist "{state}/sources.list";\nDir::Etc::sourceparts "-";\n'
        f'Dir::Etc::parts "-";\nDir::Etc::preferencesparts "-";\nAPT::Sandbox::User "root";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(state / "apt.conf"))
    subprocess.run(["apt-get", "update"], check=True, capture_output=True, timeout=60)
    return packages


@pytest.fixture
def wanting(servers, monkeypatch):
    """The tests want one program and one library."""
    monkeypatch.setattr(servers, "PROGRAMS", {"kvkeep-served": "kvkeep-server"})
    monkeypatch.setattr(servers, "LIBRARIES", {"libkvkeep.so.1": "kvkeep-library"})
    monkeypatch.setattr(servers, "NOT_FOLLOWED", frozenset({"libc6", "kvkeep-own"}))
    return servers


def test_what_is_missing_is_unpacked_with_what_it_needs(wanting, archive, tmp_path, capsys) -> None:
    folder = tmp_path / "servers"
    assert wanting.missing(folder) == ["kvkeep-server", "kvkeep-library"]
    assert wanting.main([str(folder)]) == 0
    assert wanting.missing(folder) == []
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"usr/bin/kvkeep-served", "usr/lib/libkvkeep.so.1", "usr/lib/deeper"}
    assert capsys.readouterr().out == ""


def test_what_is_there_is_not_fetched_again(wanting, archive, tmp_path) -> None:
    folder = tmp_path / "servers"
    assert wanting.main([str(folder)]) == 0
    for package in archive.glob("*.deb"):
        package.unlink()
    assert wanting.main([str(folder)]) == 0


def test_an_unknown_package_is_named(wanting, archive, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(wanting, "PROGRAMS", {"kvkeep-nowhere": "kvkeep-nowhere-to-be-found"})
    monkeypatch.setattr(wanting.os, "geteuid", lambda: 1000)
    assert wanting.main([str(tmp_path / "servers")]) == 1
    output = capsys.readouterr().out
    assert "cannot install kvkeep-nowhere-to-be-found, kvkeep-library" in output
    assert "Unable to locate package" in output


def test_a_damaged_package_is_not_unpacked(wanting, archive, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(wanting.os, "geteuid", lambda: 1000)
    package = archive / "kvkeep-library_1_all.deb"
    package.write_bytes(package.read_bytes()[:-1] + b"x")
    assert wanting.main([str(tmp_path / "servers")]) == 1
    assert "cannot install" in capsys.readouterr().out
    assert not list((tmp_path / "servers").rglob("*.so.1"))


def test_without_apt_it_says_what_to_install(wanting, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert wanting.main([str(tmp_path / "servers")]) == 1
    output = capsys.readouterr().out
    assert output == "this system has no apt-get; install by hand: kvkeep-server, kvkeep-library\n"
