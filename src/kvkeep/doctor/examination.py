"""examine: runs every probe, one after the other, and waits for none beyond its deadline.

One after the other, because some measure a rate. Each has a thread of its own, so that one that
hangs (a dead file server, a driver) is left behind instead of waited for. One thread calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import groupby

from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe, Report, Section
from kvkeep.doctor.machine import MACHINE_PROBES, SOFTWARE_PROBES
from kvkeep.doctor.model import MEMORY_PROBES, MODEL_PROBES
from kvkeep.doctor.tiers import DISK_PROBES, REMOTE_PROBES, TIER_PROBES

#: In the order in which they are shown.
PROBES: tuple[Probe, ...] = (
    *MACHINE_PROBES,
    *MEMORY_PROBES,
    *SOFTWARE_PROBES,
    *MODEL_PROBES,
    *DISK_PROBES,
    *REMOTE_PROBES,
    *TIER_PROBES,
)


def examine(
    patient: Patient, report: Report, probes: Sequence[Probe] = PROBES
) -> tuple[Section, ...]:
    """Run the probes.

    Args:
        patient: what is examined.
        report: told before each probe.
        probes: which; those of one section follow each other.
    """
    found: list[tuple[str, Finding]] = []
    for done, probe in enumerate(probes):
        report(done, len(probes), probe.topic)
        found += [(probe.section, finding) for finding in _run(probe, patient)]
    return tuple(
        Section(name, tuple(finding for _, finding in items))
        for name, items in groupby(found, lambda item: item[0])
    )


def to_change(sections: Sequence[Section]) -> list[tuple[Level, Advice]]:
    """What to change, the most urgent first; the same advice once."""
    every = [one for section in sections for one in section.findings if one.advice is not None]
    every.sort(key=lambda one: -one.level)
    listed: dict[Advice, Level] = {}
    for one in every:
        if one.advice is not None:
            listed.setdefault(one.advice, one.level)
    return [(level, advice) for advice, level in listed.items()]


def worst(sections: Sequence[Section]) -> Level:
    """The most severe level of all."""
    levels = (one.level for section in sections for one in section.findings)
    return max(levels, default=Level.FINE)


def _run(probe: Probe, patient: Patient) -> Sequence[Finding]:
    """The findings of a probe, or one that says that it did not end or failed."""
    result: list[Sequence[Finding]] = []

    def work() -> None:
        try:
            result.append(probe.run(patient))
        except Exception as error:  # noqa: BLE001  the top of this thread
            text = f"cannot be looked at: {type(error).__name__}: {error}"
            result.append([Finding(probe.topic, text, Level.WARNING)])

    thread = threading.Thread(target=work, name=f"kvkeep-doctor-{probe.topic}", daemon=True)
    thread.start()
    thread.join(probe.deadline_s)
    if not result:
        text = f"no answer within {probe.deadline_s:g} s: it hangs, or is very slow"
        return [Finding(probe.topic, text, Level.ERROR)]
    return result[0]
