"""Files that others have put, cut, swapped or renamed in the directory of the disk tier."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import FakeClock
from tiers import START, block_record, chain, stored, value_of

from artesian.cache.tiers import Record, TierFault
from artesian.cache.tiers.nvme import NvmeTier

COUNT = 10
SCRIPT = Path(__file__).parents[2] / "support" / "tier_user.py"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture
def filled(tmp_path: Path, clock: FakeClock) -> Path:
    tier = opened(tmp_path, clock)
    assert len(tier.put(chain("a", COUNT))) == COUNT
    tier.close()
    return tmp_path / "v2"


def opened(path: Path, clock: FakeClock) -> NvmeTier:
    return NvmeTier(path, budget_bytes=64 << 20, min_free_bytes=0, clock=clock)


def bucket(root: Path) -> Path:
    return next((root / "seg").iterdir())


def lose_index(root: Path) -> None:
    for path in (root / "index").iterdir():
        path.unlink()


def sound(tier: NvmeTier) -> int:
    return sum(held(tier, record) == value_of(record) for record in chain("a", COUNT))


def held(tier: NvmeTier, record: Record) -> bytes | None:
    try:
        return stored(tier, record)
    except TierFault:
        return None


def again(tier: NvmeTier) -> None:
    """Do not wait after a failure."""
    tier._suspended_until = 0.0


@pytest.mark.parametrize("name", ["foo.seg", ".seg", "-1.seg", "100000000.seg", "\udcff.seg", "0000000A.seg"])
def test_strange_names_among_segments_are_passed_over(filled: Path, clock: FakeClock, name: str) -> None:
    (bucket(filled) / name).write_bytes(b"")
    lose_index(filled)
    tier = opened(filled.parent, clock)
    assert sound(tier) == COUNT
    tier.maintain()
    tier.close()
    assert (bucket(filled) / name).exists()


@pytest.mark.parametrize("name", ["ffffffff.seg", "fffffffe.seg"])
def test_a_segment_of_the_highest_number_leaves_room_for_more(
    filled: Path, clock: FakeClock, name: str
) -> None:
    path = next(bucket(filled).iterdir())
    path.rename(path.with_name(name))
    lose_index(filled)
    tier = opened(filled.parent, clock)
    more = block_record("more")
    assert sound(tier) == COUNT and tier.put([more]) == [more.key]
    tier.close()


def test_a_cut_segment_heals_with_one_put(filled: Path, clock: FakeClock) -> None:
    os.truncate(next(bucket(filled).iterdir()), 5000)
    tier = opened(filled.parent, clock)
    assert held(tier, chain("a", 1)[0]) is None
    assert len(tier.put(chain("a", COUNT))) == COUNT and sound(tier) == COUNT
    tier.close()


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
@pytest.mark.parametrize("name", ["index/data.mdb", "index/lock.mdb", "journal", "lease"])
def test_what_is_no_regular_file_is_moved_aside(filled: Path, clock: FakeClock, name: str, kind: str) -> None:
    path, victim = filled / name, filled.parent / "victim"
    victim.write_text("precious")
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    tier = opened(filled.parent, clock)
    more = block_record("more")
    assert sound(tier) == COUNT and tier.put([more]) == [more.key]
    tier.close()
    assert path.is_file() and not path.is_symlink() and victim.read_text() == "precious"


def test_a_journal_that_turns_into_a_folder_costs_no_other_file(filled: Path, clock: FakeClock) -> None:
    tier = opened(filled.parent, clock)
    (filled / "journal").unlink()
    (filled / "journal").mkdir()
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    try:
        for record in chain("a", 2):
            again(tier)
            tier.erase([record.key])
        for fd in others:
            os.fstat(fd)
    finally:
        for fd in others:
            os.close(fd)
    assert sound(tier) == COUNT - 2
    tier.close()


def test_a_bucket_that_is_a_link_is_neither_read_nor_emptied(
    filled: Path, clock: FakeClock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    away, own = tmp_path_factory.mktemp("away") / "bucket", bucket(filled)
    shutil.move(own, away)
    own.symlink_to(away)
    tier = opened(filled.parent, clock)
    assert sound(tier) == 0
    again(tier)
    tier.erase([record.key for record in chain("a", COUNT)])
    tier.close()
    assert list(away.iterdir())


def test_a_segment_folder_that_vanishes_is_made_again(filled: Path, clock: FakeClock) -> None:
    tier = opened(filled.parent, clock)
    shutil.rmtree(filled / "seg")
    more = block_record("more")
    for _ in range(3):
        again(tier)
        tier.put([more])
    assert stored(tier, more) == value_of(more)
    tier.close()


def test_what_cannot_be_erased_now_is_said(filled: Path, clock: FakeClock) -> None:
    import fcntl

    tier, other = opened(filled.parent, clock), os.open(filled / "lease", os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TierFault):
            tier.erase([chain("a", 1)[0].key])
    finally:
        os.close(other)
    again(tier)
    assert tier.erase([chain("a", 1)[0].key]) == 1
    tier.close()


def test_erasing_is_tried_though_writing_has_just_failed(filled: Path, clock: FakeClock) -> None:
    tier = opened(filled.parent, clock)
    tier._failed(OSError(errno.ENOSPC, "full"), "told to fail")
    assert tier.put([block_record("more")]) == [] and tier.erase([chain("a", 1)[0].key]) == 1
    tier.close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("size", [0, 8192])
def test_an_index_cut_while_it_is_open_ends_no_process(filled: Path, name: str, size: int) -> None:
    done = used(filled.parent, f"cut:{name}:{size}")
    assert (done.returncode, done.stdout.split()[-1]) == (0, str(COUNT)), done.stderr


@pytest.mark.parametrize("rounds", [12, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.timeout(1200)
def test_damaged_pages_of_the_index_are_healed_within_a_few_starts(
    rounds: int, filled: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance, bad = random.Random(3), []
    for number in range(rounds):
        path = tmp_path_factory.mktemp("damaged") / "cache"
        shutil.copytree(filled.parent, path)
        file = path / "v2" / "index" / "data.mdb"
        data = bytearray(file.read_bytes())
        pages = len(data) // 4096
        to, source = chance.randrange(2, pages) * 4096, chance.randrange(2, pages) * 4096
        data[to : to + 4096] = data[source : source + 4096]
        file.write_bytes(data)
        for _ in range(6):
            done = used(path, "all")
            if done.returncode == 0 and done.stdout.split() == [str(COUNT)]:
                break
        else:
            bad.append((number, done.returncode, to // 4096, source // 4096))
        shutil.rmtree(path)
    assert not bad


def used(path: Path, what: str) -> subprocess.CompletedProcess[str]:
    """A process that uses the tier in every way, after it has done something to it."""
    command, env = [sys.executable, str(SCRIPT), str(path), what], {"PYTHONPATH": str(SCRIPT.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | env)


def test_a_model_file_changed_in_place_is_seen_though_its_time_was_set_back(tmp_path: Path) -> None:
    from artesian.engine.load.record_cache import stamps_of

    path = tmp_path / "model.gguf"
    path.write_bytes(b"a" * 100)
    state, before = path.stat(), stamps_of([path])
    time.sleep(0.02)
    path.write_bytes(b"b" * 100)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert stamps_of([path]) != before
