"""What every tier must do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from fakes import FakeClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import IDENTITY, START, TENANT, block_record, chain, key_of, named_record, read, stored, value_of

from artesian.cache.tiers import Fate, Kind, Tier, TierFault
from artesian.cache.tiers.host import HostTier
from artesian.cache.tiers.nvme import NvmeTier
from artesian.cache.tiers.shared import SharedTier

Make = Callable[..., Tier]
KINDS = ["host", "disk", "disk-zstd", "shared", "shared-zstd"]
TTL_S = 3600.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Make]:
    """Makes the tier; closed at the end."""
    opened: list[Tier] = []

    def make(budget_bytes: int = 4 << 20) -> Tier:
        tier = make_tier(request.param, tmp_path / "cache", budget_bytes, clock)
        opened.append(tier)
        return tier

    yield make
    for tier in opened:
        tier.close()


def make_tier(kind: str, path: Path, budget_bytes: int, clock: Callable[[], float]) -> Tier:
    if kind == "host":
        return HostTier(budget_bytes=budget_bytes, default_ttl_s=TTL_S, clock=clock)
    compression: Literal["none", "zstd"] = "zstd" if kind.endswith("zstd") else "none"
    maker = NvmeTier if kind.startswith("disk") else partial(SharedTier, default_ttl_s=TTL_S)
    return maker(path, budget_bytes=budget_bytes, min_free_bytes=0, clock=clock, compression=compression)


def test_what_was_put_is_found_and_read(make: Make) -> None:
    tier, records = make(), chain("a", 3)
    assert tier.put(records) == [record.key for record in records]
    found = tier.find([record.key for record in records])
    assert [f.key for f in found] == [record.key for record in records]
    assert [read(tier, f, r) for f, r in zip(found, records, strict=True)] == [value_of(r) for r in records]
    assert all(f.expires_at == START + TTL_S and f.created_at == START and f.groups == 1 for f in found)
    assert tier.stats.records == 3 and tier.stats.hits == 3 and not tier.stats.faults


def test_compressible_and_empty_payloads_come_back_as_they_were(make: Make) -> None:
    tier = make()
    for name, value in {"zeros": bytes(100_000), "odd": b"\1" * 4097, "empty": b""}.items():
        record = named_record(name, value)
        assert tier.put([record]) == [record.key]
        assert stored(tier, record) == value


def test_only_the_leading_run_is_found(make: Make) -> None:
    tier, records = make(), chain("a", 4)
    tier.put([records[0], records[1], records[3]])
    assert len(tier.find([record.key for record in records])) == 2
    assert tier.find([key_of("nobody"), records[0].key]) == []
    assert tier.find([]) == []


def test_a_record_ends_at_the_very_second(make: Make, clock: FakeClock) -> None:
    tier, record = make(), block_record("a", ttl_s=72 * 3600)
    tier.put([record])
    clock.now = START + 72 * 3600 - 0.01
    assert stored(tier, record) == value_of(record)
    clock.now = START + 72 * 3600
    assert tier.find([record.key]) == []
    assert tier.fate(record.key) is Fate.EXPIRED
    assert tier.touch({record.key: TTL_S}) == [record.key]


def test_expired_records_are_removed_and_can_be_put_again(make: Make, clock: FakeClock) -> None:
    tier, records = make(), chain("a", 3)
    tier.put(records)
    clock.advance(73 * 3600)
    tier.maintain()
    assert (tier.stats.records, tier.stats.expired) == (0, 3)
    assert tier.put(records[:1]) == [records[0].key]
    assert stored(tier, records[0]) == value_of(records[0])


def test_use_renews_the_time_to_live_and_never_shortens_it(make: Make, clock: FakeClock) -> None:
    tier, record = make(), block_record("a")
    tier.put([record])
    clock.advance(TTL_S / 2)
    assert tier.touch({record.key: TTL_S}) == []
    clock.advance(TTL_S * 0.9)
    assert stored(tier, record) == value_of(record)
    tier.touch({record.key: 1.0})
    clock.advance(TTL_S * 0.05)
    assert stored(tier, record) == value_of(record)


def test_putting_what_is_there_renews_it(make: Make, clock: FakeClock) -> None:
    tier, record = make(), block_record("a")
    tier.put([record])
    clock.advance(TTL_S * 0.9)
    assert tier.put([record]) == [record.key]
    clock.advance(TTL_S * 0.9)
    assert stored(tier, record) == value_of(record)
    assert tier.stats.records == 1


def test_pinned_records_outlive_time_and_pressure(make: Make, clock: FakeClock) -> None:
    tier = make(1 << 20)
    pinned = block_record("pinned")
    tier.put([pinned])
    assert tier.pin([pinned.key, key_of("nobody")], True) == 1
    for index in range(40):
        tier.put([block_record(index, size=60_000)])
    clock.advance(400 * 3600)
    tier.maintain()
    assert stored(tier, pinned) == value_of(pinned)
    assert tier.find([pinned.key])[0].pinned and tier.find([pinned.key])[0].expires_at == float("inf")
    assert tier.pin([pinned.key], False) == 1
    clock.advance(TTL_S - 1)
    assert stored(tier, pinned) == value_of(pinned)
    clock.advance(1)
    assert tier.find([pinned.key]) == []


def test_the_budget_is_never_exceeded_and_what_ends_soonest_gives_way(make: Make, clock: FakeClock) -> None:
    budget = 1 << 20
    tier = make(budget)
    long = block_record("long", ttl_s=100 * TTL_S)
    tier.put([long])
    for index in range(60):
        clock.advance(1)
        assert len(tier.put([block_record(index, size=50_000)])) == 1
        assert tier.stats.bytes <= budget
    assert stored(tier, long) == value_of(long)
    assert tier.find([key_of(0)]) == [] and len(tier.find([key_of(59)])) == 1
    assert tier.stats.evicted > 30 and not tier.stats.suspended


def test_recently_used_records_stay(make: Make, clock: FakeClock) -> None:
    tier = make(1 << 20)
    favourite = block_record("favourite", size=50_000)
    tier.put([favourite])
    for index in range(60):
        clock.advance(120)
        tier.put([block_record(index, size=50_000)])
        tier.touch({favourite.key: TTL_S})
    assert stored(tier, favourite) == value_of(favourite)


def test_what_can_never_fit_is_dropped_and_counted(make: Make) -> None:
    tier = make(1 << 20)
    assert tier.put([block_record("huge", size=2 << 20)]) == []
    assert tier.stats.dropped == 1
    small = block_record("small")
    assert tier.put([small]) == [small.key]


def test_erased_records_are_gone_even_if_pinned(make: Make) -> None:
    tier, records = make(), chain("a", 2)
    tier.put(records)
    tier.pin([records[0].key], True)
    assert tier.erase([records[0].key, records[1].key, key_of("nobody")]) == 2
    assert tier.find([records[0].key]) == [] and tier.stats.records == 0
    assert tier.put(records) == [record.key for record in records]


def test_a_named_record_is_replaced_only_by_another_value(make: Make) -> None:
    tier = make()
    tier.put([named_record("n", b"first")])
    tier.put([named_record("n", b"second, longer")])
    assert stored(tier, named_record("n", b"")) == b"second, longer"
    tier.put([named_record("n", b"second, longer")])
    assert tier.stats.records == 1


def test_listings_are_by_kind_and_tenant(make: Make) -> None:
    tier = make()
    other = key_of("another tenant")
    tier.put([*chain("a", 2), named_record("n", b"1"), named_record("m", b"2", tenant=other)])
    names = [entry.content for entry in tier.entries(Kind.NAMED, TENANT)]
    assert names == [b"test\0n"]
    assert len(list(tier.entries(Kind.NAMED))) == 2
    blocks = sorted(tier.entries(Kind.BLOCK, IDENTITY), key=lambda entry: entry.depth)
    assert [entry.depth for entry in blocks] == [1, 2] and blocks[1].parent == blocks[0].found.key
    assert list(tier.entries(Kind.BLOCK, other)) == []


@pytest.mark.parametrize("what", ["kind", "identity", "content"])
def test_a_record_is_not_read_as_another(make: Make, what: str) -> None:
    tier, record = make(), block_record("a")
    tier.put([record])
    found = tier.find([record.key])[0]
    out = memoryview(bytearray(found.payload_bytes))
    asked = {"kind": record.kind, "identity": record.identity, "content": record.content}
    asked[what] = Kind.NAMED if what == "kind" else bytes(32)
    with pytest.raises(TierFault):
        tier.read(found, **asked, out=out)  # type: ignore[arg-type]
    assert sum(tier.stats.faults.values()) == 1


def test_a_clock_that_ran_ahead_makes_nothing_immortal(make: Make, clock: FakeClock) -> None:
    tier, record = make(), block_record("a")
    clock.now = START + 365 * 86400
    tier.put([record])
    clock.now = START
    tier.maintain()
    found = tier.find([record.key])
    if found:  # kept, but no longer than its time to live from now on (and a bound for shared directories)
        assert found[0].created_at <= START and found[0].expires_at <= START + 8 * TTL_S


def test_a_clock_that_goes_back_loses_nothing(make: Make, clock: FakeClock) -> None:
    tier, record = make(), block_record("a")
    tier.put([record])
    clock.now = START - 3600
    tier.maintain()
    assert stored(tier, record) == value_of(record)
    clock.now = START + 60
    tier.maintain()
    assert stored(tier, record) == value_of(record)


def test_a_clock_that_is_not_set_yet_expires_nothing_for_good(make: Make, clock: FakeClock) -> None:
    tier, record = make(), block_record("a")
    tier.put([record])
    clock.now = 12.0
    tier.maintain()
    clock.now = START + 60
    tier.maintain()
    assert stored(tier, record) == value_of(record)


def test_a_closed_tier_finds_nothing_and_takes_nothing(make: Make) -> None:
    tier, record = make(), block_record("a")
    tier.put([record])
    tier.close()
    assert tier.find([record.key]) == [] or isinstance(tier, HostTier)
    assert tier.fate(record.key) is None or isinstance(tier, SharedTier)
    assert list(tier.entries(Kind.BLOCK)) == [] or isinstance(tier, SharedTier)
    tier.maintain()


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "touch", "pin", "unpin", "erase", "wait", "maintain", "reopen"]),
        st.integers(0, 7),
        st.sampled_from([10.0, 100.0, 1000.0]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["host", "disk"])
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(acts=ACTS)
def test_a_tier_with_room_is_a_dictionary_with_times(
    kind: str, acts: list[tuple[str, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock, path = FakeClock(START), tmp_path_factory.mktemp("cache")
    tier = make_tier(kind, path, 64 << 20, clock)
    model: dict[int, tuple[float, float, bool]] = {}  # ends, ttl, pinned
    for act, index, ttl_s in acts:
        record = block_record(index, size=500, ttl_s=ttl_s)
        ends, kept_s, pinned = model.get(index, (0.0, 0.0, False))
        live = pinned or ends > clock.now
        if not live:
            model.pop(index, None)
        if act == "put" or act == "touch" and live:
            if act == "put":
                assert tier.put([record]) == [record.key]
            else:
                assert tier.touch({record.key: ttl_s}) == []
            if not pinned:
                new_ends = max(ends, clock.now + ttl_s) if live else clock.now + ttl_s
                model[index] = (new_ends, max(new_ends - clock.now, ttl_s), False)
        elif act == "touch":
            assert tier.touch({record.key: ttl_s}) == [record.key]
        elif act in ("pin", "unpin"):
            assert tier.pin([record.key], act == "pin") == int(live)
            if live and pinned != (act == "pin"):
                model[index] = (clock.now + kept_s, kept_s, act == "pin")
        elif act == "erase":
            tier.erase([record.key])
            model.pop(index, None)
        elif act == "wait":
            clock.advance(ttl_s / 3)
        elif act == "maintain":
            tier.maintain()
        elif kind == "disk":
            tier.close()
            tier = make_tier(kind, path, 64 << 20, clock)
        for other in range(8):
            ends, _, pinned = model.get(other, (0.0, 0.0, False))
            record = block_record(other, size=500)
            slack = 1.0  # touches that gain little are not written
            if pinned or ends > clock.now + slack:
                assert stored(tier, record) == value_of(record)
            elif ends <= clock.now:
                assert tier.find([record.key]) == []
    tier.close()
