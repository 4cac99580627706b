"""Every wrong configuration ends with one message: what is wrong, where, and how to mend it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app


@dataclass(frozen=True)
class Wrong:
    """One wrong configuration.

    Attributes:
        what: what is wrong with it.
        says: texts that the message must hold: the thing, and how to mend it.
        yaml: content of the settings file; None for no file.
        env: variables.
        extra: value of ``--extra``, as a text.
        command: the command that runs into it, when it is not ``config explain``. ``{dir}`` is an
            empty folder, ``{file}`` the settings file, ``{store}`` an extra config.
    """

    what: str
    says: tuple[str, ...]
    yaml: str | bytes | None = None
    env: dict[str, str] = field(default_factory=dict)
    extra: str | None = None
    command: tuple[str, ...] = ()


def in_yaml(what: str, content: str | bytes, *says: str) -> Wrong:
    """Wrong in the settings file."""
    return Wrong(what, says, yaml=content)


def in_env(what: str, name: str, value: str, *says: str) -> Wrong:
    """Wrong in a variable."""
    return Wrong(what, (name, *says), env={name: value})


def in_extra(what: str, content: str, *says: str) -> Wrong:
    """Wrong in the engine's extra config."""
    return Wrong(what, ("--extra", *says), extra=content)


def by_command(what: str, command: str, *says: str) -> Wrong:
    """A command that is told something wrong."""
    return Wrong(what, says, command=tuple(command.split()))


#: An extra config with a store that is not there.
STORE = '{"remote.url": "redis://127.0.0.1:9/0"}'

TYPOS = [
    in_yaml("a misspelt key", "cpu:\n  sise: 1GiB\n", "cpu.sise", "did you mean cpu.size?"),
    in_yaml("a misspelt section", "dsik:\n  path: /x\n", "dsik", "did you mean the section disk?"),
    in_yaml("a key of another section", "disk:\n  reserve: 1GiB\n", "did you mean cpu.reserve?"),
    in_yaml("a key at the top that belongs below", "lease: 5s\n", "did you mean lookup.lease?"),
    in_yaml("LMCache's name", "max_local_cpu_size: 20\n", "max_local_cpu_size", "config import"),
    in_yaml("a key twice", "cpu:\n  size: 1GiB\n  size: 2GiB\n", "'size' is given twice", "line 3"),
    in_yaml("nested and dotted", "cpu:\n  size: 1GiB\ncpu.size: 2GiB\n", "cpu.size is given twice"),
    in_yaml("a section that is a value", "cpu: 20GiB\n", "cpu", "section", "cpu.size"),
    in_yaml("a misspelt policy", "cpu.policy: lur\n", "cpu.policy", "'lur'", "'lru'"),
    in_yaml("a misspelt allocator", "cpu.allocator: pages\n", "cpu.allocator", "'paged'"),
    in_env("a misspelt variable", "KVKEEP_CPU_SISE", "1GiB", "did you mean KVKEEP_CPU_SIZE?"),
    in_env("a variable of no setting", "KVKEEP_DEBUG", "1", "config explain"),
    in_extra("a misspelt key", '{"cpu.sized": "1GiB"}', "did you mean cpu.size?"),
    in_extra("a nested misspelt key", '{"lookup": {"tiemout": 1}}', "did you mean lookup.timeout?"),
]
UNITS = [
    in_yaml("a size without a unit", "cpu.size: '20'\n", "cpu.size", "20GiB"),
    in_yaml("a size that is a forgotten unit", "cpu.size: 20\n", "cpu.size = 20", "4096"),
    in_yaml("a unit that there is not", "cpu.size: 20Gig\n", "'20Gig'", "20GiB"),
    in_yaml("a negative size", "cpu.size: -1GiB\n", "'-1GiB'", "20GiB"),
    in_yaml("a size with a comma", "cpu.size: 1,5GiB\n", "'1,5GiB'", "20GiB"),
    in_yaml("a fraction of a byte", "cpu.size: 1.5\n", "cpu.size = 1.5", "whole number"),
    in_env("a size in words", "KVKEEP_DISK_SIZE", "lots", "disk.size", "20GiB"),
    in_yaml("a duration without a unit", "lookup.timeout: '5'\n", "lookup.timeout", "500ms"),
    in_yaml("a duration in days", "lookup.lease: 1d\n", "'1d'", "1h"),
    in_yaml("a duration of nothing", "lookup.timeout: 0s\n", "lookup.timeout", "greater than 0"),
    in_yaml("a duration for ever", "lookup.timeout: .inf\n", "lookup.timeout", "finite"),
    in_env("a negative duration", "KVKEEP_LOOKUP_TIMEOUT", "-1s", "lookup.timeout", "500ms"),
    in_extra("a size as a flag", '{"cpu.size": true}', "cpu.size = True", "20GiB"),
]
TYPES = [
    in_yaml("a number of tokens as a text", "chunk_size: many\n", "chunk_size", "whole number"),
    in_yaml("a number as a text in YAML", "chunk_size: '256'\n", "chunk_size", "whole number"),
    in_yaml("no tokens", "chunk_size: 0\n", "chunk_size = 0", "must be 1 at least"),
    in_yaml(
        "too many threads", "cpu.copy_threads: 1000\n", "cpu.copy_threads", "must be 256 at most"
    ),
    in_yaml("a flag as a number", "cpu.huge_pages: 1\n", "cpu.huge_pages", "true or false"),
    in_env("a flag in words", "KVKEEP_STORE_DECODE", "maybe", "store_decode", "true or false"),
    in_env("a number in words", "KVKEEP_CHUNK_SIZE", "big", "chunk_size", "whole number"),
    in_yaml("a path that is a list", "disk.path: [a, b]\n", "disk.path", "path"),
    in_yaml("an empty path", "disk.path: ''\n", "disk.path = ''", "write a path"),
    in_env("a variable that was never set", "KVKEEP_DISK_PATH", "", "disk.path", "leave the"),
    in_extra("a home of nobody", '{"disk.path": "~no-such-user/kv"}', "disk.path", "whole path"),
    in_yaml("a name with a slash", "cpu.shared_name: a/b\n", "cpu.shared_name", "letters, digits"),
    in_yaml("an empty model", "identity.model: ''\n", "identity.model", "at least"),
    in_yaml("tags that are a list", "identity.tags: [a]\n", "identity.tags", "{team: search}"),
    in_env("tags that are no YAML", "KVKEEP_IDENTITY_TAGS", "{a", "identity.tags", "{team: a}"),
    in_yaml("a node map of words", "cpu.numa: {gpu0: node1}\n", "cpu.numa", "{0: 0, 1: 1}"),
    in_env("a node map as a word", "KVKEEP_CPU_NUMA", "near", "cpu.numa", "auto"),
    in_yaml("plugins that are a mapping", "plugins: {name: a}\n", "plugins", "name"),
    in_yaml("a plugin without a class", "plugins: [{name: a}]\n", "plugin a", "module"),
    in_yaml(
        "a plugin whose class is a path",
        "plugins: [{name: a, module: my/plugin.py}]\n",
        "plugins",
        "module",
    ),
    in_extra("an extra config that is a list", "[1]", "JSON object"),
    in_extra("an extra config that is no JSON", "{cpu.size: 1}", "no JSON"),
    in_yaml("a file that is a list", "- cpu\n", "must be a mapping"),
    in_yaml("a file that is no YAML", "cpu:\n  size: [1\n", "no valid YAML", "line 3"),
    in_yaml("tabs", "cpu:\n\tsize: 1GiB\n", "no valid YAML", "line 2"),
    in_yaml("a file of bytes", b"\xff\xfe\x00", "no valid YAML"),
]
COMBINATIONS = [
    in_yaml("a disk size without a disk", "disk.size: 1GiB\n", "disk.size", "disk.path"),
    in_env("disk threads without a disk", "KVKEEP_DISK_THREADS", "8", "disk.threads", "disk.path"),
    in_yaml(
        "a lease shorter than its lookup",
        "lookup: {timeout: 10s, lease: 5s}\n",
        "lookup.lease",
        "must be longer than lookup.timeout",
    ),
    in_yaml(
        "two plugins of one name",
        "plugins: [{name: a, module: 'm:C'}, {name: a, module: 'm:D'}]\n",
        "plugins gives a name twice",
    ),
    in_yaml(
        "a plugin from two places",
        "plugins: [{name: a, module: 'm:C', entry_point: b}]\n",
        "plugin a",
        "either module",
    ),
]
FILES = [
    by_command("a file that is not there", "config explain --config {dir}/no.yaml", "no.yaml"),
    by_command("a file that is a folder", "config explain --config {dir}", "{dir}", "directory"),
    Wrong(
        "a variable that names no file", ("/no/such.yaml",), env={"KVKEEP_CONFIG": "/no/such.yaml"}
    ),
    by_command("an LMCache file that is not there", "config import {dir}/l.yaml", "l.yaml"),
    by_command("a model without a config", "doctor --model {dir}", "config.json", "Hugging Face"),
    by_command("a model that is not there", "doctor --model {dir}/none", "none"),
    by_command("no model to run", "demo --model {dir}/none", "{dir}/none", "no such folder"),
    by_command("a tier that is not there", "inspect {dir}/none", "none"),
    by_command("a folder that is no tier", "fsck {dir}", "{dir}"),
    by_command("a trace that is not there", "replay {dir}/t.jsonl", "t.jsonl"),
    by_command("a trace of settings", "replay {file}", "{file}", "no line is a request"),
    by_command("a policy that there is not", "replay {file} --policy best", "'best'", "known:"),
    by_command("a pool without a unit", "replay {file} --size 64", "--size '64'", "20GiB"),
]

STORES = [
    in_yaml("a store that is no URL", "remote.url: redis\n", "remote.url", "redis://"),
    by_command(
        "a kind of store that there is not",
        """bench --extra {"remote.url":"memcached://a"}""",
        "remote.url",
        "memcached://",
        "redis",
    ),
    by_command(
        "a store without an address",
        """bench --extra {"remote.url":"redis://"}""",
        "remote.url",
        "redis://host:port",
    ),
    by_command(
        "an option that a store does not have",
        """bench --extra {"remote.url":"redis://a?optoin=1"}""",
        "optoin",
        "client_name",
    ),
    by_command(
        "a folder that is not absolute",
        """bench --extra {"remote.url":"file://shared/x"}""",
        "file:///absolute/path",
    ),
    in_yaml("a codec that there is not", "disk: {path: /x, codec: gzip}\n", "disk.codec", "'zstd'"),
    in_yaml("a codec without a store", "remote.codec: zstd\n", "remote.codec", "remote.url"),
    in_yaml(
        "a store that forgets in negative time",
        "remote: {url: 'redis://a', ttl: 0s}\n",
        "remote.ttl",
        "greater than 0",
    ),
    in_yaml(
        "all of a lookup's time for the store",
        "remote: {url: 'redis://a', lookup_share: 1.5}\n",
        "remote.lookup_share",
        "0.9",
    ),
    by_command(
        "a server that is not there",
        "bench --extra {store}",
        "redis://127.0.0.1:9",
        "start the store",
    ),
]
NUMBERS = [
    in_yaml("a port alone", "metrics.listen: '9400'\n", "metrics.listen", "127.0.0.1:PORT"),
    in_yaml("a port that is a number", "metrics.listen: 9400\n", "metrics.listen", "text"),
    in_yaml("a port that there is not", "metrics.listen: '127.0.0.1:99999'\n", "metrics.listen"),
    in_yaml(
        "metrics for other machines without a token",
        "metrics.listen: '0.0.0.0:9400'\n",
        "metrics.listen",
        "metrics.token",
    ),
    in_yaml("a token without an endpoint", "metrics.token: aaaaaaaaaaaaaaaa\n", "metrics.listen"),
    in_yaml(
        "a short token",
        "metrics: {listen: '127.0.0.1:9400', token: short}\n",
        "metrics.token",
        "at least",
    ),
    in_yaml("a form of logs that there is not", "log.format: xml\n", "log.format", "'json'"),
    by_command(
        "an endpoint that is not there", "top --url http://127.0.0.1:9/metrics", "127.0.0.1:9"
    ),
    by_command("an endpoint that is no URL", "top --url localhost:9400", "http://127.0.0.1:PORT"),
]

WRONG = [*TYPOS, *UNITS, *TYPES, *COMBINATIONS, *FILES, *STORES, *NUMBERS]


@pytest.fixture
def end(monkeypatch, tmp_path):
    """Run a wrong configuration; returns the result, the folder and the settings file."""
    for name in list(os.environ):
        if name.startswith("KVKEEP_"):
            monkeypatch.delenv(name)
    folder, file = tmp_path / "folder", tmp_path / "kvkeep.yaml"
    folder.mkdir()

    def invoke(case: Wrong):
        content = case.yaml if case.yaml is not None else "cpu.size: 1GiB\n"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        for name, value in case.env.items():
            monkeypatch.setenv(name, value)
        command = [
            part.replace("{dir}", str(folder))
            .replace("{file}", str(file))
            .replace("{store}", STORE)
            for part in case.command or ("config", "explain")
        ]
        if case.yaml is not None:
            command += ["--config", str(file)]
        if case.extra is not None:
            command += ["--extra", case.extra]
        return CliRunner().invoke(app, command), str(folder), str(file)

    return invoke


@pytest.mark.parametrize("case", [pytest.param(one, id=one.what) for one in WRONG])
def test_one_message_says_what_where_and_how(end, case):
    done, folder, file = end(case)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    [message] = done.stderr.splitlines()
    assert message.startswith("kvkeep ")
    for text in case.says:
        assert text.replace("{dir}", folder).replace("{file}", file) in message
    if case.yaml is not None:
        assert file in message
    assert "Traceback" not in message
    assert "errors.pydantic.dev" not in message


def test_there_are_fifty_and_no_two_are_the_same():
    assert len({(one.yaml, tuple(one.env.items()), one.extra, one.command) for one in WRONG}) >= 50
