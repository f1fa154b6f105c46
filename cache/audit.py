"""Whether all that lies in a disk tier is sound: every record is read and compared with its index entry."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .spec import block_key, named_key
from .tiers import Found, Kind, TierFault
from .tiers.index import Place
from .tiers.lease import try_lock
from .tiers.nvme import NvmeTier
from .tiers.segment import RecordHeader


@dataclass(slots=True)
class Audit:
    """What was found."""

    good: int = 0
    payload_bytes: int = 0
    """Of the good records."""
    expired: int = 0
    """Records that have ended and wait to be given back: not read."""
    unreachable: int = 0
    """Good blocks behind one that is not here: they are never reused."""
    bad: dict[bytes, str] = field(default_factory=dict)
    """What is wrong with a record, by key."""
    damaged: int = 0
    """Of those: the index entry itself cannot be read."""
    stray_files: list[str] = field(default_factory=list)
    """Segments that no index entry names and no living process writes."""

    @property
    def is_sound(self) -> bool:
        return not self.bad and not self.stray_files


def audit(tier: NvmeTier, now: float) -> Audit:
    """Read everything once. Changes nothing; what fails is dropped with the tier's next change."""
    found = Audit()
    parents: dict[bytes, bytes] = {}
    """Of the good blocks that do not begin a chain."""
    keys: set[bytes] = set()
    for key, place, record in list(tier.places()):
        if place is None:
            found.bad[key] = "its index entry is damaged"
            found.damaged += 1
        elif record is None:
            found.bad[key] = "the index does not know its segment"
        elif record.expires_at <= now:
            found.expired += 1
        else:
            try:
                header = _check(tier, record, place)
            except TierFault as err:
                found.bad[key] = f"{err} in {tier.file_of(record)}"
                continue
            found.good += 1
            found.payload_bytes += record.payload_bytes
            keys.add(key)
            if header.kind is Kind.BLOCK and header.depth > 1:
                parents[key] = header.parent
    found.unreachable = _unreachable(parents, keys)
    found.stray_files = _stray(tier)
    return found


def is_own_key(header: RecordHeader) -> bool:
    """Whether a record's key is the digest of what it claims to be."""
    if header.kind is Kind.BLOCK:
        return block_key(header.parent, header.content) == header.key
    return named_key(header.identity, header.content) == header.key


def _check(tier: NvmeTier, found: Found, place: Place) -> RecordHeader:
    """Raises `TierFault`."""
    header = tier.header(found)
    tier.read(found, header.kind, header.identity, header.content, memoryview(bytearray(found.payload_bytes)))
    says = (place.kind, place.depth, place.groups, place.created_at)
    if says != (header.kind, header.depth, header.groups, header.created_at):
        raise TierFault("the index says otherwise")
    if not is_own_key(header):
        raise TierFault("another key than its content's")
    return header


def _unreachable(parents: dict[bytes, bytes], keys: set[bytes]) -> int:
    """How many of the blocks `parents` lead to a block that is not among `keys`."""
    state: dict[bytes, bool] = {}
    for key in parents:
        path = []
        while key in parents and key not in state:
            path.append(key)
            key = parents[key]
        state |= dict.fromkeys(path, state.get(key, key in keys))
    return sum(not reachable for reachable in state.values())


def _stray(tier: NvmeTier) -> list[str]:
    names = tier.files.names()
    known = tier.segment_names()
    stray: list[str] = []
    for name in names:
        if name not in known:
            try:
                fd = os.open(tier.files.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue  # gone meanwhile
            try:
                if try_lock(fd):
                    stray.append(name)
            finally:
                os.close(fd)
    return sorted(stray)
