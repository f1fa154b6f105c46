"""Sharing, copying, windows and eviction of blocks, on small pools."""

from __future__ import annotations

from fakes import kv_group

from artesian.cache import NO_BLOCK, CacheConfig, KVStore, Lease, Prompt
from artesian.cache.sizing import blocks_for_budget


def store_of(blocks: int = 16, window: int = 0) -> KVStore:
    groups = [kv_group()] + ([kv_group("window", window=window)] if window else [])
    return KVStore(groups, [blocks] * len(groups), "digest", CacheConfig())


def computed(store: KVStore, tokens: list[int], salt: str = "") -> tuple[Lease, Prompt]:
    """A sequence that has computed all its tokens and published them."""
    prompt = store.prompt(tokens, salt)
    leased = store.acquire(store.lookup(prompt, tokens))
    assert leased is not None
    lease, copies = leased
    assert store.reserve(lease, -(-len(tokens) // store.block_tokens))
    store.drop_copies(copies)
    store.commit(lease, prompt, len(tokens))
    return lease, prompt


def cached_tokens(store: KVStore, tokens: list[int], salt: str = "") -> int:
    return store.lookup(store.prompt(tokens, salt), tokens).tokens


def test_last_token_of_a_known_prompt_is_left_to_compute() -> None:
    store = store_of()
    computed(store, list(range(12)))
    assert cached_tokens(store, list(range(12))) == 11


def test_match_ends_inside_the_block_where_prompts_diverge() -> None:
    store = store_of()
    computed(store, list(range(12)))
    assert cached_tokens(store, [0, 1, 2, 3, 4, 5, 99, 98, 97]) == 6


def test_partly_shared_block_is_copied_and_never_written_in_place() -> None:
    store = store_of()
    first, _ = computed(store, list(range(8)))
    other = [0, 1, 2, 3, 4, 5, 99, 98, 97]
    leased = store.acquire(store.lookup(store.prompt(other, ""), other))
    assert leased is not None
    lease, copies = leased
    assert [c.source for c in copies] == [first.blocks[0][1]]
    assert lease.blocks[0] == [first.blocks[0][0], copies[0].target]
    assert copies[0].target not in first.blocks[0]
    store.check_integrity([first, lease], copies)


def test_salt_and_weights_and_layout_are_identity() -> None:
    store = store_of()
    computed(store, list(range(8)), salt="a")
    assert cached_tokens(store, list(range(8)), salt="b") == 0
    assert cached_tokens(store, list(range(8)), salt="a") == 7
    other = KVStore([kv_group()], [16], "other digest", CacheConfig())
    assert store.prompt([1], "a").root != other.prompt([1], "a").root


def test_salts_that_join_to_the_same_text_stay_apart() -> None:
    store = store_of()
    assert store.prompt([1], "a|b").root != store.prompt([1], "a").root != store.prompt([1], "").root


def test_second_sequence_changes_over_to_the_block_that_was_published_first() -> None:
    store = store_of()
    tokens = list(range(8))
    prompts = [store.prompt(tokens, "") for _ in range(2)]
    leases = []
    for prompt in prompts:
        leased = store.acquire(store.nothing(prompt))
        assert leased is not None and store.reserve(leased[0], 2)
        leases.append(leased[0])
    assert store.commit(leases[0], prompts[0], 8) == 2
    assert store.commit(leases[1], prompts[1], 8) == 0
    assert leases[0].blocks == leases[1].blocks
    store.check_integrity(leases)


def test_eviction_takes_the_least_recently_used_prompt_from_its_end() -> None:
    store = store_of(blocks=6)
    for base in (0, 100):
        lease, _ = computed(store, list(range(base, base + 12)))
        store.release(lease)
    assert cached_tokens(store, list(range(12))) == 11
    lease, _ = computed(store, list(range(12)))  # use the older one again
    store.release(lease)
    fresh, _ = computed(store, list(range(200, 208)))
    assert cached_tokens(store, list(range(12))) == 11
    assert cached_tokens(store, list(range(100, 112))) == 4
    store.check_integrity([fresh])


def test_blocks_of_running_sequences_are_never_evicted() -> None:
    store = store_of(blocks=4)
    lease, _ = computed(store, list(range(12)))
    other = store.acquire(store.nothing(store.prompt([7], "")))
    assert other is not None and not store.reserve(other[0], 2)
    assert store.reserve(other[0], 1)
    store.check_integrity([lease, other[0]])


def test_window_group_gives_back_what_no_position_can_read() -> None:
    store = store_of(window=6)
    lease, _ = computed(store, list(range(16)))
    store.pass_window(lease, 16)
    assert [b == NO_BLOCK for b in lease.blocks[1]] == [True, True, False, False]
    assert NO_BLOCK not in lease.blocks[0]


def test_hit_needs_the_window_behind_its_end() -> None:
    store = store_of(window=6)
    lease, _ = computed(store, list(range(16)))
    store.release(lease)
    assert cached_tokens(store, list(range(16))) == 15
    store.tree.evict(1, 1)  # the window block of the oldest node: the end of the prompt
    assert cached_tokens(store, list(range(20))) == 12
    store.tree.evict(1, 3)
    assert cached_tokens(store, list(range(20))) == 0
    store.check_integrity([])


def test_fork_shares_full_blocks_and_copies_the_open_one() -> None:
    store = store_of()
    parent, _ = computed(store, list(range(10)))
    forked = store.fork(parent, 9)
    assert forked is not None
    lease, copies = forked
    assert lease.blocks[0][:2] == parent.blocks[0][:2]
    assert [c.source for c in copies] == [parent.blocks[0][2]]
    store.check_integrity([parent, lease], copies)


def test_fork_behind_a_passed_window_is_refused() -> None:
    store = store_of(window=6)
    parent, _ = computed(store, list(range(24)))
    store.pass_window(parent, 24)
    assert store.fork(parent, 9) is None
    store.check_integrity([parent])


def test_budget_is_respected_by_the_sum_of_the_groups() -> None:
    groups = [kv_group(), kv_group("window", window=6)]
    counts = blocks_for_budget(groups, 100_000, sequences=4, chunk_tokens=8)
    assert sum(n * g.block_bytes for n, g in zip(counts, groups, strict=True)) <= 100_000
    assert counts[1] == 4 * (groups[1].blocks_for(14) + 2)


def test_forgetting_a_prompt_takes_what_continues_it_and_spares_what_others_hang_on() -> None:
    store = store_of()
    for tokens in ([*range(8), 50, 51, 52, 53], [*range(4), 60, 61, 62, 63]):
        lease, _ = computed(store, tokens)
        store.release(lease)
    prompt = store.prompt(list(range(8)), "")
    below = store.tree.forget(prompt.keys)
    assert len(below) == 1 and store.tree.get(below[0]) is None
    assert store.tree.get(prompt.keys[1]) is None and store.tree.get(prompt.keys[0]) is not None
    assert cached_tokens(store, [*range(4), 60, 61, 62, 63, 9]) == 8
    store.check_integrity([])


def test_what_a_sequence_holds_is_not_forgotten() -> None:
    store = store_of()
    lease, prompt = computed(store, list(range(8)))
    store.tree.forget(prompt.keys)
    assert store.tree.get(prompt.keys[1]) is not None
    store.check_integrity([lease])
