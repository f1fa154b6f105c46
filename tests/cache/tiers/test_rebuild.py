"""An index made anew: after a crash in the middle of it, from orphans, when it turns out to be damaged."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest
from fakes import FakeClock
from tiers import START, block_record, chain, named_record, stored, value_of

from artesian.cache.tiers import Fate, Kind, nvme
from artesian.cache.tiers.index import Index
from artesian.cache.tiers.nvme import NvmeTier


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


def opened(path: Path, clock: FakeClock, budget_bytes: int = 64 << 20) -> NvmeTier:
    return NvmeTier(path, budget_bytes=budget_bytes, min_free_bytes=0, clock=clock)


def segments(path: Path) -> list[Path]:
    return sorted((path / "v2" / "seg").rglob("*.seg"))


def test_a_rebuild_that_was_cut_short_is_done_again(tmp_path: Path, clock: FakeClock) -> None:
    tier, records = opened(tmp_path, clock), chain("a", 5)
    tier.put(records)
    tier.close()
    (tmp_path / "v2" / "index" / "data.mdb").unlink()
    Index(tmp_path / "v2" / "index").close()  # all that a process which dies then has made
    tier = opened(tmp_path, clock)
    tier.maintain()
    assert [stored(tier, record) for record in records] == [value_of(record) for record in records]
    tier.close()


def test_an_orphan_of_a_killed_writer_is_in_nobodys_way(tmp_path: Path, clock: FakeClock) -> None:
    tier, first, second = opened(tmp_path, clock), block_record("a"), block_record("b")
    tier.put([first])
    index = tier._index
    assert index is not None
    orphan = segments(tmp_path)[0].with_name(f"{index.totals().next_segment:08x}.seg")
    tier.close()
    orphan.write_bytes(b"")
    tier = opened(tmp_path, clock)
    assert tier.put([second]) == [second.key] and not tier.stats.faults
    tier.maintain()
    assert not orphan.exists()
    assert stored(tier, first) == value_of(first) and stored(tier, second) == value_of(second)
    tier.close()


def test_segments_of_one_number_do_not_hide_each_other(tmp_path: Path, clock: FakeClock) -> None:
    tier, first, second = opened(tmp_path, clock), block_record("a"), block_record("b", ttl_s=90_000)
    tier.put([first])
    tier.put([second])
    tier.close()
    one, two = segments(tmp_path)
    two.rename(two.with_name(one.name))
    tier = opened(tmp_path, clock)
    tier.rebuild_index()
    assert stored(tier, first) == value_of(first) and stored(tier, second) == value_of(second)
    third = block_record("c")
    assert tier.put([third]) == [third.key] and stored(tier, third) == value_of(third)
    tier.close()


def test_a_rebuild_by_another_process_mixes_nothing_up(tmp_path: Path, clock: FakeClock) -> None:
    ours, theirs = opened(tmp_path, clock), opened(tmp_path, clock)
    records = chain("a", 8)
    ours.put(records[:2])
    theirs.put(records[2:4])
    theirs.rebuild_index()
    ours.put(records[4:6])
    theirs.put(records[6:])
    for tier in (ours, theirs):
        assert [stored(tier, record) for record in records] == [value_of(record) for record in records]
        tier.close()


@pytest.mark.parametrize("error", [lmdb.CorruptedError, lmdb.PageNotFoundError])
def test_an_index_that_turns_out_damaged_is_made_anew(
    error: type[lmdb.Error], tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, records = opened(tmp_path, clock), chain("a", 5)
    tier.put(records)

    def fails(*_: object) -> None:
        raise error("flipped")

    with monkeypatch.context() as patch:
        patch.setattr("artesian.cache.tiers.index.Snapshot.get", fails)
        assert tier.find([records[0].key]) == []
    assert tier.stats.faults == {"index": 1}
    old = (tmp_path / "v2" / "index" / "data.mdb").stat().st_ino
    tier.maintain()
    assert (tmp_path / "v2" / "index" / "data.mdb").stat().st_ino != old
    assert [stored(tier, record) for record in records] == [value_of(record) for record in records]
    tier.close()


def test_a_passing_failure_of_the_index_costs_no_rebuild(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, clock).close()

    def fails(*_: object, **__: object) -> None:
        raise lmdb.MemoryError("no room to map it")

    with monkeypatch.context() as patch:
        patch.setattr(lmdb, "open", fails)
        patch.setattr(nvme, "rebuild", None)
        tier = opened(tmp_path, clock)
        assert tier.stats.suspended and tier.find([]) == []
    tier._suspended_until = 0.0
    record = block_record("a")
    assert tier.put([record]) == [record.key]
    tier.close()


def test_a_rebuild_remembers_the_last_word_on_each_record(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path, clock)
    again, gone, value = block_record("again"), block_record("gone"), named_record("n", b"1")
    tier.put([again, gone, value])
    tier.erase([again.key, gone.key])
    tier.put([again, named_record("n", b"2")])
    tier.touch({again.key: 50_000.0})
    tier.pin([again.key], True)
    tier.rebuild_index()
    assert stored(tier, again) == value_of(again) and tier.find([again.key])[0].pinned
    assert tier.find([gone.key]) == [] and stored(tier, value) == b"2"
    assert [entry.content for entry in tier.entries(Kind.NAMED, value.identity)] == [value.content]
    tier.pin([again.key], False)
    clock.advance(49_999)
    assert tier.find([again.key])
    tier.close()


def test_a_shortened_journal_says_what_the_long_one_did(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artesian.cache.tiers.nvme_changes.JOURNAL_BYTES", 1)
    tier, records = opened(tmp_path, clock), chain("a", 6)
    tier.put(records)
    tier.erase([records[5].key])
    tier.pin([records[0].key], True)
    for _ in range(40):
        clock.advance(60)
        tier.touch({record.key: 3600.0 for record in records})
    journal = tmp_path / "v2" / "journal"
    size, ends = journal.stat().st_size, [found.expires_at for found in tier.find([r.key for r in records])]
    tier.maintain()
    assert journal.stat().st_size < size / 10
    tier.rebuild_index()
    assert [found.expires_at for found in tier.find([r.key for r in records])] == ends
    assert len(ends) == 5
    tier.close()


def test_what_a_failed_change_noted_is_not_believed(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, records = opened(tmp_path, clock), chain("a", 2)
    tier.put(records)

    def fails(*_: object) -> None:
        raise lmdb.MapFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("artesian.cache.tiers.index.Change.save_totals", fails)
        tier.pin([record.key for record in records], True)
    assert tier.stats.faults == {"full": 1}
    tier._suspended_until = 0.0
    tier.touch({records[0].key: 7200.0})
    tier.rebuild_index()
    assert not any(found.pinned for found in tier.find([record.key for record in records]))
    tier.close()


def test_a_lost_directory_is_made_again(tmp_path: Path, clock: FakeClock) -> None:
    tier, record = opened(tmp_path / "cache", clock), block_record("a")
    tier.put([record])
    (tmp_path / "cache").rename(tmp_path / "moved")
    for _ in range(3):
        tier._suspended_until = 0.0
        tier.put([record])
    assert stored(tier, record) == value_of(record)
    assert segments(tmp_path / "cache")
    tier.close()


def test_a_deleted_segment_is_not_kept_alive_by_another_reader(tmp_path: Path, clock: FakeClock) -> None:
    reader, writer = opened(tmp_path, clock), opened(tmp_path, clock)
    record = block_record("a")
    writer.put([record])
    assert stored(reader, record) == value_of(record)
    writer.erase([record.key])
    writer.close()
    reader.maintain()
    held = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [name for name in held if name.startswith(str(tmp_path)) and name.endswith("(deleted)")]
    assert reader.fate(record.key) is Fate.DELETED
    reader.close()


def test_a_planted_link_to_a_folder_is_not_followed(tmp_path: Path, clock: FakeClock) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    tier, record = opened(tmp_path / "cache", clock), block_record("a")
    bucket = int(START + record.ttl_s) // 3600
    (tmp_path / "cache" / "v2" / "seg" / str(bucket)).symlink_to(victim)
    assert tier.put([record]) == [] and tier.stats.suspended
    assert list(victim.iterdir()) == [] and tier.files.names() == []
    tier.close()
