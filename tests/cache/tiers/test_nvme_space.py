"""What gives way on a disk tier and what must not: budgets, full disks, clocks."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from fakes import FakeClock
from tiers import START, block_record, chain, named_record, read, stored, value_of

from artesian.cache.tiers import Fate, TierFault, nvme_changes, segment, segment_files
from artesian.cache.tiers.nvme import NvmeTier


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


def opened(path: Path, clock: FakeClock, budget_bytes: int = 4 << 20, min_free_bytes: int = 0) -> NvmeTier:
    return NvmeTier(path, budget_bytes=budget_bytes, min_free_bytes=min_free_bytes, clock=clock)


def disk_usage(path: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


def test_a_record_that_can_never_fit_moves_nobody_out(tmp_path: Path, clock: FakeClock) -> None:
    tier, records = opened(tmp_path, clock, 2 << 20), chain("a", 10, size=50_000)
    tier.put(records)
    assert tier.put([block_record("huge", size=3 << 20)]) == []
    assert len(tier.find([record.key for record in records])) == 10 and not tier.stats.evicted
    tier.close()


def test_a_disk_that_others_fill_moves_nobody_out_for_nothing(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, records = opened(tmp_path, clock, 2 << 20, min_free_bytes=1 << 20), chain("a", 10, size=50_000)
    tier.put(records)
    monkeypatch.setattr(tier, "_free_bytes", lambda: -(1 << 30))
    assert tier.put([block_record("b")]) == []
    assert len(tier.find([record.key for record in records])) == 10 and not tier.stats.evicted
    tier.close()


def test_without_holes_the_budget_is_kept_by_whole_segments(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "punch", lambda *_: False)
    tier = opened(tmp_path, clock)
    for index in range(150):
        clock.advance(1)
        assert tier.put([block_record(index, size=60_000)]), index
        assert tier.stats.bytes <= 4 << 20
    assert disk_usage(tmp_path) <= 4 << 20 and tier.stats.records > 30
    alive = [stored(tier, block_record(index, size=60_000)) is not None for index in range(150)]
    assert alive[-1]
    tier.rebuild_index()
    assert [stored(tier, block_record(i, size=60_000)) is not None for i in range(150)] == alive
    tier.close()


def test_without_holes_deleted_bytes_are_overwritten(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_files, "punch", lambda *_: False)
    tier = opened(tmp_path, clock)
    secret, other = block_record("secret", size=50_000), block_record("other", size=50_000)
    tier.put([secret, other])
    assert tier.erase([secret.key]) == 1
    raw = b"".join(path.read_bytes() for path in (tmp_path / "v2" / "seg").rglob("*.seg"))
    assert secret.content not in raw and value_of(other) in raw
    assert not any(value_of(secret)[at : at + 64] in raw for at in range(0, 50_000 - 64, 4096))
    tier.close()


def test_the_first_segment_of_a_full_disk_is_tried_again(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, record = opened(tmp_path, clock), block_record("a")

    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(nvme_changes, "write_all", fails)
        assert tier.put([record]) == []
    tier._suspended_until = 0.0
    assert tier.put([record]) == [record.key] and tier.stats.faults == {"full": 1}
    tier.maintain()
    assert tier.stats.bytes == pytest.approx(disk_usage(tmp_path), rel=0.05)
    tier.close()


def test_a_quota_that_statvfs_does_not_know_makes_records_give_way(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened(tmp_path, clock)
    for index in range(5):
        clock.advance(1)
        tier.put([block_record(index, size=50_000)])
    write_all = segment.write_all

    def quota(fd: int, parts: list[bytes | memoryview], offset: int) -> int:
        if disk_usage(tmp_path / "v2" / "seg") > 280_000:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return write_all(fd, parts, offset)

    monkeypatch.setattr(nvme_changes, "write_all", quota)
    late = block_record("late", size=50_000)
    assert tier.put([late]) == [] and tier.stats.faults == {"full": 1}
    tier._suspended_until = 0.0
    assert tier.put([late]) == [late.key]
    assert tier.fate(block_record(0).key) is Fate.EVICTED
    tier.close()


def test_a_place_that_cannot_be_read_twice_is_written_anew(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, record = opened(tmp_path, clock), block_record("a")
    tier.put([record])
    found = tier.find([record.key])[0]

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        for _ in range(2):
            with pytest.raises(TierFault):
                read(tier, found, record)
    assert tier.put([record]) == [record.key]
    assert tier.find([record.key])[0].place != found.place
    assert stored(tier, record) == value_of(record)
    tier.close()


def test_an_idle_tier_writes_nothing(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path, clock)
    tier.put(chain("a", 3))
    tier.maintain()
    index = tmp_path / "v2" / "index" / "data.mdb"
    before = index.read_bytes()
    for _ in range(3):
        clock.advance(1)
        tier.maintain()
    assert index.read_bytes() == before
    tier.close()


def test_expired_named_records_leave_their_owners_list(tmp_path: Path, clock: FakeClock) -> None:
    tier, other = opened(tmp_path, clock), named_record("other", b"y", ttl_s=50_000)
    tier.put([named_record(str(index), b"x") for index in range(300)])
    tier.put([other])
    clock.advance(4000)
    tier.maintain()
    assert tier._index is not None
    with tier._index.snapshot() as view:
        assert list(view.named(None)) == [other.key]
    tier.close()


# -- clocks ----------------------------------------------------------------------------------------


def test_what_is_used_under_a_clock_of_1970_outlives_its_correction(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path, clock)
    used, unpinned, idle = block_record("used"), block_record("unpinned"), block_record("idle")
    tier.put([used, unpinned, idle])
    tier.pin([unpinned.key], True)
    tier.close()
    clock.now = 12.0
    tier, fresh = opened(tmp_path, clock), block_record("fresh")
    assert tier.put([fresh]) == [fresh.key]
    assert tier.touch({used.key: 3600.0}) == []
    assert tier.pin([unpinned.key], False) == 1
    tier.maintain()
    assert all(stored(tier, record) for record in (used, unpinned, idle, fresh))
    clock.now = START + 600
    tier.maintain()
    assert all(stored(tier, record) for record in (used, unpinned, idle, fresh))
    clock.now = START + 3 * 3600
    tier.maintain()
    assert tier.stats.records == 0
    tier.close()


def test_a_clock_that_ran_ahead_makes_nothing_immortal(tmp_path: Path, clock: FakeClock) -> None:
    tier, record = opened(tmp_path, clock), block_record("a")
    clock.now = START + 365 * 86400
    tier.put([record])
    clock.now = START
    tier.maintain()
    assert stored(tier, record) == value_of(record)
    clock.now = START + 3 * 3600
    tier.maintain()
    assert tier.find([record.key]) == [] and tier.stats.records == 0
    tier.close()


def test_a_small_step_back_of_the_clock_moves_no_end(tmp_path: Path, clock: FakeClock) -> None:
    tier, record = opened(tmp_path, clock), block_record("a")
    tier.put([record])
    clock.advance(-90)
    tier.maintain()
    assert tier.find([record.key])[0].expires_at == START + 3600
    tier.close()
