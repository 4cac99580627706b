"""LoadCostModel: whether loading chunks from a slow tier is faster than computing them again.

A tier is asked only if loading is expected to take less time than computing would (fault 42). Both
are measured while the engine works, as lines: so many seconds before the first chunk or token, and
so many for each. What was not measured yet is hoped for: the tier is asked. A tier that was judged
too slow is asked again now and then, and that one answer replaces what was known of it, so that it
comes back when it is quick again. The decision is a pure function of what was measured. Callable
from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvkeep.metrics import Metrics

#: How much an observation still counts after the next one: about the last twenty matter.
KEEP = 0.95
#: Standard errors that a slope must be away from none to be shown.
SOUND_ERRORS = 3.0
#: Prompts whose refusals are remembered, so that each is counted once.
_MAX_REFUSED = 1024
#: Cause under which tokens are counted for which a tier was not asked.
TOO_SLOW = "slower than computing"


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds that a number of units takes.

    Attributes:
        start_s: before the first unit.
        unit_s: for each unit.
    """

    start_s: float
    unit_s: float

    def seconds(self, units: float) -> float:
        """Expected time for ``units``."""
        return self.start_s + units * self.unit_s


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of (units, seconds), the older the lighter, as the sums that a line needs.

    Attributes:
        weight: of all observations.
        units: weighted sum of units; likewise the others.
        seconds: of seconds.
        units_squared: of units times units.
        seconds_squared: of seconds times seconds.
        product: of units times seconds.
    """

    weight: float = 0.0
    units: float = 0.0
    seconds: float = 0.0
    units_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0

    def plus(self, units: float, seconds: float) -> Observed:
        """With one observation more."""
        return Observed(
            KEEP * self.weight + 1.0,
            KEEP * self.units + units,
            KEEP * self.seconds + seconds,
            KEEP * self.units_squared + units * units,
            KEEP * self.seconds_squared + seconds * seconds,
            KEEP * self.product + units * seconds,
        )

    def line(self) -> Line | None:
        """The line with the least squared error among those that do not fall; None if unknown.

        Where all observations have one size, all of their time is ascribed to the units.
        """
        if not self.weight:
            return None
        mean_s = self.seconds / self.weight
        if not self.units:
            return Line(mean_s, 0.0)
        spread = self.units_squared - self.units**2 / self.weight
        together = self.product - self.units * mean_s
        if spread > 1e-6 * self.units_squared:
            if together <= 0:
                return Line(mean_s, 0.0)
            start_s = mean_s - together / spread * self.units / self.weight
            if start_s >= 0:
                return Line(start_s, together / spread)
        return Line(0.0, self.product / self.units_squared)

    def sound_line(self) -> Line | None:
        """The line, for people to see, where the observations bear it; None if unknown.

        That is where the time of a unit is at least :data:`SOUND_ERRORS` of its standard errors.
        Else all of the time is ascribed to the units, as their mean: a slope that is mostly noise
        would show rates that nobody has ever seen.
        """
        line = self.line()
        if line is None or not self.units:
            return line
        mean_s = self.seconds / self.weight
        spread = self.units_squared - self.units**2 / self.weight
        together = self.product - self.units * mean_s
        rest = self.seconds_squared - self.seconds * mean_s - line.unit_s * together
        freedom = self.weight - 2.0
        if freedom > 0 and line.unit_s**2 * spread * freedom > SOUND_ERRORS**2 * rest:
            return line
        return Line(0.0, self.seconds / self.units)

    def unit_s(self) -> float | None:
        """Seconds that one unit more takes, never nothing at all; None if unknown."""
        line = self.line()
        if line is None or not self.units:
            return None
        return line.unit_s or self.seconds / self.units


def pays(load: Line | None, token_s: float | None, num_chunks: int, chunk_tokens: int) -> bool:
    """Loading so many chunks is expected to be quicker than computing them, or nobody knows.

    Args:
        load: seconds by chunks, of the tier.
        token_s: seconds for each token that the engine computes.
        num_chunks: how many may have to come from the tier.
        chunk_tokens: tokens in a chunk.
    """
    if load is None or token_s is None:
        return True
    return load.seconds(num_chunks) < token_s * num_chunks * chunk_tokens


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What the rule is told.

    Attributes:
        chunk_tokens: tokens in a chunk.
        chunk_bytes: its size in memory.
        enabled: False asks every tier.
        retry_s: how long a tier that is too slow is left alone before it is tried again.
    """

    chunk_tokens: int = 1
    chunk_bytes: int = 1
    enabled: bool = True
    retry_s: float = 30.0


@dataclass(slots=True)
class _Tier:
    """What is known of one tier."""

    observed: Observed = field(default_factory=Observed)
    asked_at: float = 0.0  # when it was last asked, or has answered
    on_trial: bool = False  # its next answer replaces what is known
    refused: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # prompts, oldest first


class LoadCostModel:
    """Measures loads and prefills, and decides."""

    def __init__(
        self,
        options: CostOptions,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known yet.

        Args:
            options: sizes, and whether to decide at all.
            metrics: where decisions are counted and rates are shown.
            clock: seconds that only grow.
        """
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._tiers: dict[str, _Tier] = {}  # guarded by _lock
        self._prefill = Observed()  # guarded by _lock
        metrics.watch_prefill(self._prefill_rate)

    def watch(self, tier: str) -> None:
        """Show what is expected of a tier."""
        self._metrics.watch_load(
            tier, rate=lambda: self._load_rate(tier), start_s=lambda: self._load_start(tier)
        )

    def admits(self, tier: str, num_chunks: int, *, prompt: bytes) -> bool:
        """Whether to ask a tier for up to so many chunks, to load them. A refusal is counted.

        Whoever is let through tells :meth:`note_load` what came of it.

        Args:
            tier: its name.
            num_chunks: how many may have to come from it.
            prompt: names the prompt, as the key of its last chunk does. An engine may ask for one
                that waits in each of its steps: that is one refusal, until :meth:`note_stored`.
        """
        if not self._options.enabled or num_chunks < 1:
            return True
        now = self._clock()
        with self._lock:
            known = self._tiers.setdefault(tier, _Tier())
            admitted = self._pays_locked(known, num_chunks)
            if not admitted and now - known.asked_at >= self._options.retry_s:
                admitted = known.on_trial = True
            if admitted:
                known.asked_at = now
            is_new = not admitted and _is_new(prompt, known.refused)
        if is_new:
            self._metrics.tier_skipped(tier, TOO_SLOW, num_chunks * self._options.chunk_tokens)
        return admitted

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """These chunks were computed: a prompt of theirs that is refused again is another one."""
        with self._lock:
            refusing = [known.refused for known in self._tiers.values() if known.refused]
            for refused in refusing:
                for key in keys:
                    refused.pop(key, None)

    def is_slow(self, tier: str, num_chunks: int) -> bool:
        """Whether lookups for so many chunks leave the tier out at present."""
        with self._lock:
            known = self._tiers.get(tier)
            if known is None or not self._options.enabled or num_chunks < 1:
                return False
            return not self._pays_locked(known, num_chunks)

    def _pays_locked(self, known: _Tier, num_chunks: int) -> bool:
        return pays(
            known.observed.line(),
            self._prefill.unit_s(),
            num_chunks,
            self._options.chunk_tokens,
        )

    def note_load(self, tier: str, num_chunks: int, seconds: float) -> None:
        """A tier was asked, and ``num_chunks`` chunks have come from it after ``seconds``.

        That a tier has nothing is no load, unless it took so long to say so that a chunk would have
        been computed meanwhile.
        """
        now = self._clock()
        with self._lock:
            known = self._tiers.setdefault(tier, _Tier())
            if num_chunks < 1 and self._is_quick_locked(seconds):
                if known.on_trial:  # nothing was learnt: whoever is next may try
                    known.on_trial, known.asked_at = False, now - self._options.retry_s
                return
            before = Observed() if known.on_trial else known.observed
            known.observed = before.plus(num_chunks, seconds)
            known.on_trial, known.asked_at = False, now

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of prompts in ``seconds``."""
        if num_tokens > 0:
            with self._lock:
                self._prefill = self._prefill.plus(num_tokens, seconds)

    def _is_quick_locked(self, seconds: float) -> bool:
        token_s = self._prefill.unit_s()
        return token_s is None or seconds < token_s * self._options.chunk_tokens

    def _prefill_rate(self) -> float:
        """Tokens per second; 0.0 if unknown."""
        with self._lock:
            line = self._prefill.sound_line()
        return 1.0 / line.unit_s if line is not None and line.unit_s else 0.0

    def _load_line(self, tier: str) -> Line | None:
        with self._lock:
            known = self._tiers.get(tier)
            return known.observed.sound_line() if known is not None else None

    def _load_rate(self, tier: str) -> float:
        """Bytes per second once a load has begun; 0.0 if unknown."""
        line = self._load_line(tier)
        return self._options.chunk_bytes / line.unit_s if line is not None and line.unit_s else 0.0

    def _load_start(self, tier: str) -> float:
        """Seconds before the first chunk; 0.0 if unknown."""
        line = self._load_line(tier)
        return line.start_s if line is not None else 0.0


def _is_new(prompt: bytes, refused: OrderedDict[bytes, None]) -> bool:
    """The prompt was not refused lately; it is from now on."""
    is_new = prompt not in refused
    refused[prompt] = None
    refused.move_to_end(prompt)
    if len(refused) > _MAX_REFUSED:
        refused.popitem(last=False)
    return is_new
