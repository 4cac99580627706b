"""The examination: deadlines, order of advice, and what each probe says of a machine."""

from __future__ import annotations

import resource
import socket
import threading
import tomllib
from pathlib import Path

import psutil
import pytest

from kvkeep.config import load_settings
from kvkeep.doctor import machine as software
from kvkeep.doctor import model, tiers
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.doctor.examination import PROBES, examine, to_change, worst
from kvkeep.lookup.sockets import socket_directory

ROOT = Path(__file__).parents[3]


def patient(**extra):
    env = extra.pop("env", {})
    return Patient(
        load_settings(extra={name.replace("__", "."): value for name, value in extra.items()}),
        env,
        None,
    )


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


def ignore(done, total, doing):
    pass


def test_a_probe_that_hangs_is_left_behind():
    release = threading.Event()

    def hang(_):
        release.wait()
        return []

    probes = [
        Probe("a", "slow", hang, deadline_s=0.05),
        Probe("a", "next", lambda _: [Finding("next", "here")]),
    ]
    [section] = examine(patient(), ignore, probes)
    release.set()
    slow, after = section.findings
    assert (slow.topic, slow.level) == ("slow", Level.ERROR)
    assert "no answer within 0.05 s" in slow.text
    assert after.text == "here"


def test_a_probe_that_fails_is_a_finding():
    def fail(_):
        raise RuntimeError("the driver is gone")

    [section] = examine(patient(), ignore, [Probe("a", "driver", fail)])
    assert section.findings[0].level is Level.WARNING
    assert "RuntimeError: the driver is gone" in section.findings[0].text


def test_advice_stands_in_order_of_urgency_and_once():
    first, second = Advice("do this"), Advice("and that", "x: 1")
    probes = [
        Probe("a", "a", lambda _: [Finding("a", "", Level.NOTE, second)]),
        Probe("b", "b", lambda _: [Finding("b", "", Level.ERROR, first)]),
        Probe("b", "c", lambda _: [Finding("c", "", Level.WARNING, second)]),
    ]
    sections = examine(patient(), ignore, probes)
    assert [section.name for section in sections] == ["a", "b"]
    assert to_change(sections) == [(Level.ERROR, first), (Level.WARNING, second)]
    assert worst(sections) is Level.ERROR
    assert worst(()) is Level.FINE


def test_every_probe_has_a_deadline_and_sections_stay_together():
    assert all(0 < probe.deadline_s <= 60 for probe in PROBES)
    names = [probe.section for probe in PROBES]
    assert len(set(names)) == sum(a != b for a, b in zip([None, *names], names, strict=False))


def test_the_pool_is_opened_and_described():
    found = by_topic(model.pool(patient(cpu__size="64MiB", cpu__reserve="4KiB")))
    assert found["pool"].values["bytes"] == 80 << 20
    assert any("slots" in line for line in found["pool"].values["report"])
    assert found["available"].values["available_bytes"] > 0
    assert "huge pages" in found


def test_a_pool_that_the_machine_does_not_have_is_an_error_with_one_it_has():
    found = by_topic(model.pool(patient(cpu__size="900TiB")))
    assert found["pool"].level is Level.ERROR
    assert found["pool"].advice.line.startswith("cpu.size: ")
    size = load_settings(extra={"cpu.size": found["pool"].advice.line.split()[1]}).cpu.size
    assert size < psutil.virtual_memory().total


def test_pools_of_several_ranks_must_fit_together():
    available = model.available_bytes()
    settings = load_settings(extra={"cpu.size": f"{available // 4}B"})
    alone = by_topic(model.pool(Patient(settings, {}, None, 1)))
    assert alone["pool"].level is not Level.ERROR
    eight = by_topic(model.pool(Patient(settings, {}, None, 8)))
    assert eight["pool"].level is Level.ERROR


def test_a_running_engine_s_shared_memory_is_not_touched():
    found = by_topic(model.pool(patient(cpu__size="64MiB", cpu__shared_name="kvkeep-doctor-t")))
    assert found["pool"].level in (Level.FINE, Level.NOTE)
    assert not Path("/dev/shm/kvkeep-doctor-t").exists()


@pytest.mark.parametrize(
    "version, bounds, wanted",
    [
        ("0.32.1", ("0.32", "0.33"), True),
        ("0.33.0", ("0.32", "0.33"), False),
        ("0.31.9", ("0.32", "0.33"), False),
        ("2.13.0+cpu", ("2.6", "3"), True),
        ("0.32.0rc1", ("0.32", "0.33"), True),
    ],
)
def test_versions_are_compared_as_numbers(version, bounds, wanted):
    assert software.is_supported(version, bounds) is wanted


def test_supported_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [requirement for group in groups for requirement in group]
    for name, (low, high) in software.SUPPORTED.items():
        [text] = {one.split(";")[0] for one in wanted if one.startswith(f"{name}>")}
        assert text == f"{name}>={low},<{high}"


def test_the_disk_is_measured_and_nothing_stays(tmp_path):
    one = patient(disk__path=str(tmp_path / "new" / "tier"), disk__size="64MiB")
    found = by_topic([*tiers.place(one), *tiers.rates(one)])
    assert "made when it is first used" in found["directory"].text
    assert found["rate"].values["written_bytes_per_s"] > 0
    assert found["rate"].values["read_bytes_per_s"] > 0
    assert "4.0 MiB" in found["rate"].text  # a part of the budget
    assert list(tmp_path.iterdir()) == []


def test_a_budget_beyond_what_is_free_is_a_warning_with_one_that_fits(tmp_path):
    found = by_topic(tiers.place(patient(disk__path=str(tmp_path), disk__size="900TiB")))
    assert found["room"].level is Level.WARNING
    assert load_settings(
        extra={"disk.path": "/x", "disk.size": found["room"].advice.line.split()[1]}
    )


def test_what_the_tier_uses_already_counts_as_its_own(tmp_path, monkeypatch):
    (tmp_path / "chunk").write_bytes(bytes(5000))
    found = by_topic(tiers.place(patient(disk__path=str(tmp_path))))
    assert found["room"].values["used_bytes"] == 5000
    monkeypatch.setattr(tiers, "_COUNT_S", -1.0)  # a directory that takes too long to count
    found = by_topic(tiers.place(patient(disk__path=str(tmp_path))))
    assert found["room"].values["used_bytes"] == 0


def test_a_file_in_place_of_the_directory_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    one = patient(disk__path=str(tmp_path / "file"))
    assert by_topic(tiers.place(one))["directory"].level is Level.ERROR
    assert tiers.rates(one) == []


def test_memory_and_network_file_systems_are_warned_of(tmp_path, monkeypatch):
    one = patient(disk__path=str(tmp_path))
    for kind, words in (("tmpfs", "that is memory"), ("nfs4", "another machine serves it")):
        mounts = [psutil._ntuples.sdiskpart("x", str(tmp_path), kind, "")]
        monkeypatch.setattr(psutil, "disk_partitions", lambda all, mounts=mounts: mounts)
        found = by_topic(tiers.place(one))["file system"]
        assert (found.level, words in found.text) == (Level.WARNING, True)
        assert found.advice is not None


def test_the_directory_of_sockets(tmp_path):
    assert tiers.sockets(patient(lookup__socket_dir=str(tmp_path)))[0].level is Level.FINE
    long = tmp_path / ("x" * 120)
    [found] = tiers.sockets(patient(lookup__socket_dir=str(long)))
    assert (found.level, "lookup.socket_dir" in found.advice.line) == (Level.ERROR, True)
    assert list(tmp_path.iterdir()) == []


def test_workers_that_answer_are_counted_and_sockets_of_dead_ones_are_not(tmp_path):
    directory = socket_directory(tmp_path, {})
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as alive, socket.socket(socket.AF_UNIX) as dead:
        alive.bind(str(directory / "a-0.sock"))
        alive.listen(1)
        dead.bind(str(directory / "b-0.sock"))
        [found] = tiers.sockets(patient(lookup__socket_dir=str(tmp_path)))
    assert (found.level, found.values) == (Level.FINE, {"sockets": 1})
    assert found.text.endswith("1 worker answers")


def test_plugins_are_found_or_not():
    found = tiers.plugins(
        patient(
            plugins=[
                {"name": "none", "module": "no.such.module:Class"},
                {"name": "wrong", "module": "json:loads"},
            ]
        )
    )
    assert [one.level for one in found] == [Level.ERROR, Level.ERROR]
    assert "needs module no" in found[0].text
    assert all(one.advice for one in found)


def test_little_locked_memory_matters_where_slots_are_registered(monkeypatch):
    from kvkeep.doctor import machine

    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    plain = by_topic(machine.limits(patient(cpu__size="1GiB")))
    assert plain["memlock"].level is Level.FINE
    registered = by_topic(machine.limits(patient(cpu__size="1GiB", cpu__allocator="paged")))
    assert registered["memlock"].level is Level.WARNING
    assert "ulimit" in registered["memlock"].advice.line


def test_an_installation_without_compiled_copies_is_told(monkeypatch, tmp_path):
    from kvkeep.doctor import machine
    from kvkeep.gpu.host_copy import load_rows

    found = by_topic(machine.copies(patient()))["copies"]
    assert found.values["compiled"] == (load_rows() is not None)
    monkeypatch.setattr(machine, "load_rows", lambda: None)
    monkeypatch.setattr(machine, "LIBRARY", tmp_path / "none.so")
    found = by_topic(machine.copies(patient()))["copies"]
    assert found.level is Level.NOTE
    assert "not built" in found.text
    assert "pip install" in found.advice.line
    monkeypatch.setattr(machine, "LIBRARY", tmp_path)
    assert "do not load" in by_topic(machine.copies(patient()))["copies"].text
