"""What became of keys that are gone: the latest of them, for answers about misses."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .base import Fate

GHOSTS = 8192


class Ghosts:
    """Fates by key, the oldest forgotten first. Thread-safe."""

    def __init__(self) -> None:
        self._fates: OrderedDict[bytes, Fate] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: bytes, fate: Fate) -> None:
        with self._lock:
            self._fates[key] = fate
            self._fates.move_to_end(key)
            if len(self._fates) > GHOSTS:
                self._fates.popitem(last=False)

    def forget(self, key: bytes) -> None:
        with self._lock:
            self._fates.pop(key, None)

    def get(self, key: bytes) -> Fate | None:
        return self._fates.get(key)
