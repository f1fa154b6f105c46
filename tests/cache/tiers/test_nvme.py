"""The disk tier on real files: torn, flipped, swapped, full, foreign, shared and killed."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeClock
from tiers import START, block_record, chain, named_record, read, stored, value_of

from artesian.cache.tiers import Fate, Kind, TierFault, nvme_changes
from artesian.cache.tiers import nvme as nvme_module
from artesian.cache.tiers.nvme import NvmeTier

WRITER = Path(__file__).parents[2] / "support" / "tier_writer.py"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


def opened(path: Path, clock: FakeClock, budget_bytes: int = 64 << 20, **options: object) -> NvmeTier:
    settings = {"min_free_bytes": 0, "clock": clock} | options
    return NvmeTier(path, budget_bytes=budget_bytes, **settings)  # type: ignore[arg-type]


@pytest.fixture
def tier(tmp_path: Path, clock: FakeClock) -> Iterator[NvmeTier]:
    tier = opened(tmp_path / "cache", clock)
    yield tier
    tier.close()


def segments(path: Path) -> list[Path]:
    return sorted((path / "cache" / "v2" / "seg").rglob("*.seg"))


def disk_usage(path: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


def everything(tier: NvmeTier) -> dict[bytes, tuple[object, ...]]:
    """What an index knows, by key."""
    with tier._snapshot() as view:
        assert view is not None
        return {
            key: (p.segment, p.offset, p.length, p.expires_at, p.ttl_s, p.flags, p.seq)
            for key, p in view.records()
            if p is not None
        }


# -- files -----------------------------------------------------------------------------------------


def test_files_are_the_owners_alone(tier: NvmeTier, tmp_path: Path) -> None:
    tier.put(chain("a", 3))
    tier.maintain()
    for path in (tmp_path / "cache" / "v2").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_bytes_counted_are_bytes_on_disk(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path / "cache", clock, 8 << 20)
    for index in range(100):
        clock.advance(1)
        tier.put(chain(str(index), 3, size=60_000))
    tier.maintain()
    assert tier.stats.bytes == pytest.approx(disk_usage(tmp_path), rel=0.05)
    assert disk_usage(tmp_path) <= 8 << 20
    clock.advance(3600)
    tier.maintain()
    assert disk_usage(tmp_path) < 2 << 20 and tier.stats.records == 0
    assert len(segments(tmp_path)) <= 1
    tier.close()


def test_a_reopened_tier_has_everything(tmp_path: Path, clock: FakeClock) -> None:
    first = opened(tmp_path / "cache", clock)
    records = chain("a", 20)
    first.put(records)
    first.pin([records[0].key], True)
    before = everything(first)
    first.close()
    second = opened(tmp_path / "cache", clock)
    assert everything(second) == before
    assert [stored(second, record) for record in records] == [value_of(record) for record in records]
    assert second.stats.records == 20
    assert second.stats.bytes == pytest.approx(disk_usage(tmp_path), rel=0.1)
    second.close()


def test_a_rebuilt_index_equals_the_old_one(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path / "cache", clock)
    for index in range(10):
        clock.advance(600)
        tier.put(chain(str(index), 4, ttl_s=40_000 + index))
    tier.put([named_record("n", b"1", ttl_s=50_000), named_record("m", b"2", ttl_s=50_000)])
    tier.put([named_record("n", b"other", ttl_s=50_000)])
    tier.touch({record.key: 45_000.0 for record in chain("3", 4)})
    tier.pin([chain("4", 4)[1].key], True)
    tier.pin([chain("5", 4)[1].key], True)
    tier.pin([chain("5", 4)[1].key], False)
    tier.erase([record.key for record in chain("6", 4)])
    before, size = everything(tier), tier.stats.bytes
    tier.rebuild_index()
    assert everything(tier) == before
    assert tier.stats.bytes == pytest.approx(size, rel=0.2)
    assert stored(tier, named_record("n", b"")) == b"other"
    assert tier.find([chain("6", 4)[0].key]) == []
    tier.close()


def test_a_lost_index_is_made_anew(tmp_path: Path, clock: FakeClock) -> None:
    tier, records = opened(tmp_path / "cache", clock), chain("a", 5)
    tier.put(records)
    tier.close()
    for path in (tmp_path / "cache" / "v2" / "index").iterdir():
        path.unlink()
    tier = opened(tmp_path / "cache", clock)
    assert len(tier.find([record.key for record in records])) == 5
    tier.close()


@pytest.mark.parametrize("keep", [0, 100, 5000, 9000, 20_000])
def test_a_cut_off_index_is_made_anew(keep: int, tmp_path: Path, clock: FakeClock) -> None:
    tier, records = opened(tmp_path / "cache", clock), chain("a", 300, size=64)
    tier.put(records)
    tier.close()
    index = tmp_path / "cache" / "v2" / "index" / "data.mdb"
    os.truncate(index, keep)
    tier = opened(tmp_path / "cache", clock)
    assert len(tier.find([record.key for record in records])) == 300
    tier.close()


def test_erased_bytes_are_not_on_the_disk(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path / "cache", clock)
    secret, other = block_record("secret", size=50_000), block_record("other", size=50_000)
    tier.put([secret, other])
    tier.erase([secret.key])
    raw = b"".join(path.read_bytes() for path in segments(tmp_path))
    assert value_of(secret)[:64] not in raw and value_of(secret)[-64:] not in raw
    assert secret.content not in raw and value_of(other) in raw
    tier.close()


def test_evicted_bytes_come_back_neither_by_reading_nor_by_rebuilding(
    tmp_path: Path, clock: FakeClock
) -> None:
    tier = opened(tmp_path / "cache", clock, 1 << 20)
    for index in range(50):
        clock.advance(1)
        tier.put([block_record(index, size=50_000)])
    alive = set(everything(tier))
    assert tier.fate(block_record(0).key) is Fate.EVICTED
    tier.rebuild_index()
    assert set(everything(tier)) == alive
    tier.close()


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["magic", "key", "content", "payload start", "payload end"])
def test_a_flipped_bit_is_a_miss_and_the_record_is_written_anew(
    where: str, tier: NvmeTier, tmp_path: Path
) -> None:
    record = block_record("a", size=10_000)
    tier.put([record])
    found = tier.find([record.key])[0]
    offset = (
        4096 + {"magic": 0, "key": 80, "content": 200, "payload start": 4096, "payload end": 14_095}[where]
    )
    with segments(tmp_path)[0].open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(TierFault):
        read(tier, found, record)
    assert sum(tier.stats.faults.values()) == 1
    tier.put([block_record("b")])
    assert tier.find([record.key]) == [] and tier.fate(record.key) is Fate.CORRUPT
    assert tier.put([record]) == [record.key]
    assert stored(tier, record) == value_of(record)


@pytest.mark.parametrize(
    "damage", ["removed", "truncated", "zeros", "swapped", "directory", "link", "pickle"]
)
def test_spoiled_segments_are_misses(damage: str, tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path / "cache", clock, 16 << 20)
    first, second = block_record("a", size=900_000), block_record("b", size=900_000, ttl_s=90_000)
    tier.put([first])
    tier.put([second])
    tier.close()
    one, two = segments(tmp_path)
    if damage == "removed":
        one.unlink()
    elif damage == "truncated":
        os.truncate(one, one.stat().st_size - 5000)
    elif damage == "zeros":
        one.write_bytes(bytes(one.stat().st_size))
    elif damage == "swapped":
        one.rename(tmp_path / "x")
        two.rename(one)
        (tmp_path / "x").rename(two)
    elif damage == "directory":
        one.unlink()
        one.mkdir()
    elif damage == "link":
        content = one.read_bytes()
        (tmp_path / "elsewhere").write_bytes(content)
        one.unlink()
        one.symlink_to(tmp_path / "elsewhere")
    else:
        import pickle

        one.write_bytes(pickle.dumps({"rm": "-rf"}))
    tier = opened(tmp_path / "cache", clock, 16 << 20)
    found = tier.find([first.key])
    with pytest.raises(TierFault):
        read(tier, found[0], first)
    tier.maintain()
    third = block_record("c")
    assert tier.put([third]) == [third.key]
    assert stored(tier, third) == value_of(third)
    tier.close()


def test_a_torn_tail_is_not_found_and_does_not_stop_a_rebuild(tmp_path: Path, clock: FakeClock) -> None:
    records = chain("a", 4, size=20_000)
    tier = opened(tmp_path / "cache", clock)
    tier.put(records)
    tier.close()
    segment = segments(tmp_path)[0]
    whole = segment.read_bytes()
    for cut in range(1, 30_000, 2_771):
        segment.write_bytes(whole[: len(whole) - cut])
        tier = opened(tmp_path / "cache", clock)
        tier.rebuild_index()
        found = tier.find([record.key for record in records])
        assert len(found) == (3 if cut < 24_000 else 2)
        assert all(read(tier, f, r) == value_of(r) for f, r in zip(found, records, strict=False))
        tier.close()


def test_a_flipped_bit_in_the_index_never_reads_another_record(tmp_path: Path, clock: FakeClock) -> None:
    tier, records = opened(tmp_path / "cache", clock), chain("a", 60, size=64)
    tier.put(records)
    index, key = tier._index, records[0].key
    assert index is not None
    with index.change() as change:
        data = bytearray(change._txn.get(key, db=index._records) or b"")
        data[12] ^= 1
        change._txn.put(key, bytes(data), db=index._records)
        good = bytes(change._txn.get(records[1].key, db=index._records) or b"")
        change._txn.put(records[2].key, good, db=index._records)
    assert tier.find([key]) == [] and tier.find([records[2].key]) == []
    assert stored(tier, records[1]) == value_of(records[1])
    tier.close()


def test_files_of_another_format_version_are_left_alone(tmp_path: Path, clock: FakeClock) -> None:
    newer = tmp_path / "cache" / "v3" / "seg"
    newer.mkdir(parents=True)
    (newer / "data").write_bytes(b"from the future")
    tier = opened(tmp_path / "cache", clock)
    tier.put(chain("a", 2))
    clock.advance(100 * 3600)
    tier.maintain()
    tier.rebuild_index()
    tier.close()
    assert (newer / "data").read_bytes() == b"from the future"


def test_an_index_of_another_version_is_made_anew(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, records = opened(tmp_path / "cache", clock), chain("a", 3)
    tier.put(records)
    with tier._index.change() as change:  # type: ignore[union-attr]
        change.totals.version = 99
    tier.close()
    tier = opened(tmp_path / "cache", clock)
    assert len(tier.find([record.key for record in records])) == 3
    assert tier.stats.faults == {"index": 1}
    tier.close()


# -- the device says no ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, "full"), (errno.EIO, "io"), (errno.EROFS, "read_only")]
)
def test_a_failing_write_is_a_drop_and_writing_goes_on_later(
    number: int, kind: str, tier: NvmeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, lost = block_record("kept"), block_record("lost")
    tier.put([kept])
    size = segments(tmp_path)[0].stat().st_size

    def fails(fd: int, parts: list[bytes], offset: int) -> int:
        os.pwrite(fd, bytes(parts[0])[:100], offset)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(nvme_changes, "write_all", fails)
        assert tier.put([lost]) == []
    assert tier.stats.faults == {kind: 1} and tier.stats.suspended and tier.stats.dropped == 1
    assert segments(tmp_path)[0].stat().st_size == size
    assert tier.put([lost]) == []  # suspended: not even tried
    assert stored(tier, kept) == value_of(kept)
    tier._suspended_until = 0.0
    assert tier.put([lost]) == [lost.key] and not tier.stats.suspended
    assert stored(tier, lost) == value_of(lost)


def test_a_failing_read_is_a_fault(tier: NvmeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    record = block_record("a")
    tier.put([record])
    found = tier.find([record.key])[0]

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(TierFault):
            read(tier, found, record)
    assert tier.stats.faults == {"io": 1}
    assert stored(tier, record) == value_of(record)  # not dropped: the record may be sound


def test_the_floor_of_free_space_is_kept(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path / "cache", clock, min_free_bytes=1 << 60)
    assert tier.put([block_record("a")]) == []
    assert tier.stats.faults == {"full": 1}
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", mounted]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def test_a_full_disk_costs_misses_and_nothing_else(small_disk: Path, clock: FakeClock) -> None:
    tier = opened(small_disk / "cache", clock)
    for index in range(100):
        clock.advance(1)
        tier._suspended_until = 0.0
        tier.put([block_record(index, size=300_000)])
    assert tier.stats.faults.get("full") or tier.stats.evicted
    (small_disk / "filler").write_bytes(bytes(max(0, os.statvfs(small_disk).f_bavail * 4096 - 8192)))
    for index in range(100, 110):
        tier._suspended_until = 0.0
        tier.put([block_record(index, size=300_000)])
    for index in range(110):
        record = block_record(index, size=300_000)
        assert stored(tier, record) in (None, value_of(record))
    (small_disk / "filler").unlink()
    tier._suspended_until = 0.0
    last = block_record("last", size=300_000)
    assert tier.put([last]) == [last.key] and stored(tier, last) == value_of(last)
    tier.close()


def test_a_file_system_that_turns_read_only_still_serves_reads(small_disk: Path, clock: FakeClock) -> None:
    tier, record = opened(small_disk / "cache", clock), block_record("a")
    tier.put([record])
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    tier = opened(small_disk / "cache", clock)
    assert tier.put([block_record("b")]) == [] and tier.stats.suspended
    reader = opened(small_disk / "cache", clock, read_only=True)
    assert not reader.is_open or stored(reader, record) == value_of(record)
    tier.close()
    reader.close()


def test_a_linked_directory_is_refused(tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "victim").mkdir()
    (tmp_path / "cache" / "v2").symlink_to(tmp_path / "victim")
    tier = opened(tmp_path / "cache", clock)
    assert tier.put([block_record("a")]) == [] and tier.stats.suspended
    assert list((tmp_path / "victim").iterdir()) == []
    tier.close()


# -- several processes -----------------------------------------------------------------------------


def run_writer(path: Path, name: str, count: int, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(WRITER), str(path), name, str(count), *flags]
    environ = {**os.environ, "PYTHONPATH": str(WRITER.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


def test_two_processes_write_and_both_see_all(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "cache"
    writers = [run_writer(path, name, 30) for name in ("a", "b")]
    said = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [len(lines) for lines in said] == [30, 30]
    tier = opened(path, clock)
    for name in ("a", "b"):
        for index in range(30):
            record = block_record((name, index), size=20_000)
            assert stored(tier, record) == value_of(record)
    assert tier.stats.records == 60
    tier.close()


def test_a_held_lease_costs_a_drop_not_a_wait(
    tier: NvmeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_module, "LEASE_TIMEOUT_S", 0.05)
    holder = run_writer(tmp_path / "cache", "x", 1, "--hold")
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    record = block_record("a")
    assert tier.put([record]) == [] and tier.stats.faults == {"lease": 1}
    holder.kill()
    holder.communicate()
    assert tier.put([record]) == [record.key]


def test_leftovers_of_a_dead_writer_are_cleaned_up(tmp_path: Path, clock: FakeClock) -> None:
    tier = opened(tmp_path / "cache", clock)
    tier.put(chain("a", 2))
    tier.close()
    segment = segments(tmp_path)[0]
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(bytes(50_000))
    orphan = segment.with_name("00ffffff.seg")
    orphan.write_bytes(segment.read_bytes())
    tier = opened(tmp_path / "cache", clock)
    tier.maintain()
    assert segment.stat().st_size == size and not orphan.exists()
    assert len(tier.find([record.key for record in chain("a", 2)])) == 2
    tier.close()


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.long)])
def test_kill_9_loses_nothing_that_was_committed(rounds: int, tmp_path: Path, clock: FakeClock) -> None:
    path, chance = tmp_path / "cache", random.Random(7)
    promised: list[str] = []
    for number in range(rounds):
        writer = run_writer(path, f"round{number}", 100_000)
        assert writer.stdout is not None
        for _ in range(chance.randint(1, 40)):
            promised.append(writer.stdout.readline().strip())
        writer.kill()
        promised += [line for line in writer.communicate()[0].splitlines(True) if line.endswith("\n")]
        tier = opened(path, clock, 1 << 30)
        if number % 3 == 2:
            tier.rebuild_index()
        tier.maintain()
        for line in promised:
            name, _, index = line.strip().rpartition(":")
            record = block_record((name, int(index)), size=20_000)
            assert stored(tier, record) == value_of(record), line
        for entry in tier.entries(Kind.BLOCK):
            out = memoryview(bytearray(entry.found.payload_bytes))
            tier.read(entry.found, entry.kind, entry.identity, entry.content, out)
        assert not tier.stats.faults
        tier.close()
