"""Whether a failed attempt is tried again, and when. Knows status codes and headers, not sockets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class RetryPolicy:
    """How a client retries."""

    max_retries: int = 2
    """Attempts after the first."""
    first_wait_s: float = 0.5
    """Doubles with each attempt, where the server does not say how long."""
    max_wait_s: float = 8.0
    """Of the client's own waits."""
    max_server_wait_s: float = 60.0
    """A server that asks for more is not waited for: the error is raised at once."""
    jitter: float = 0.25
    """Share of a wait that is drawn at random, so that clients do not come back together."""
    uniform: Callable[[], float] = random.random
    """From 0 to 1."""
    now: Callable[[], float] = time.time
    """Seconds since the epoch: `Retry-After` may be a date."""

    def wait_s(self, attempt: int, status: int | None, headers: Mapping[str, str]) -> float | None:
        """Return the seconds to wait after a failed attempt (0 = the first), None to give up.

        `status` is None when no answer came. Headers' names are in lower case.
        """
        if attempt >= self.max_retries:
            return None
        told = headers.get("x-should-retry")
        if told == "false" or told != "true" and status is not None and status not in RETRIED_STATUSES:
            return None
        asked_s = self._asked_s(headers)
        if asked_s is None:
            # Less, never more: the cap stays the cap.
            base_s = min(self.first_wait_s * 2.0**attempt, self.max_wait_s)
            return base_s * (1 - self.jitter * self.uniform())
        if asked_s > self.max_server_wait_s:
            return None
        # More, never less: before that the server would refuse again.
        return asked_s * (1 + self.jitter * self.uniform())

    def _asked_s(self, headers: Mapping[str, str]) -> float | None:
        for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
            value = headers.get(name)
            if value is None:
                continue
            try:
                seconds = float(value) * scale
            except ValueError:
                try:
                    seconds = parsedate_to_datetime(value).timestamp() - self.now()
                except ValueError:
                    continue
            if seconds == seconds:  # not NaN
                return max(0.0, seconds)
        return None
