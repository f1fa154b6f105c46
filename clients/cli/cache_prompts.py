"""What lies in a disk cache, as prompts: which chain of blocks belongs to which response or name.

A server leaves a trace of each prompt it answered and a record of each that was named. Both hold the prompt's
tokens, and so do the blocks: a chain is labelled by the longest prompt that lies on it.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ...cache.listing import Chain, chains
from ...cache.spec import block_key, block_keys, root_key, tenant_digest
from ...cache.tiers import NO_KEY, Entry, Kind, TierFault
from ...cache.tiers.nvme import NvmeTier
from ...server.api.caches import NAMES, NamedPrompt
from ...server.cache_trace import NAMESPACE, Trace, Turn, unpack_tokens

DEFAULT_TENANT = tenant_digest("")
SHORTEST = 8
"""Characters of an id or a key that may stand for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """A prompt that was answered or named, as the server remembers it."""

    entry: Entry
    id: str
    """The response's id, or the name."""
    is_name: bool
    model: str
    created_at: float
    count: int
    """Tokens of the prompt."""
    packed: bytes
    """They, as `pack_tokens` has them: a listing of many long prompts unpacks one at a time."""
    key: str
    turns: tuple[Turn, ...] = ()
    is_pinned: bool = False
    """A name that keeps its prompt pinned."""

    @property
    def tenant(self) -> bytes:
        return self.entry.identity

    def keys(self, block_tokens: int) -> list[bytes]:
        """The prompt's full blocks, as keys of no tenant and no model."""
        return block_keys(NO_KEY, unpack_tokens(self.count, self.packed).tolist(), block_tokens)[0]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of the listing. Times are seconds since the epoch."""

    id: str
    """The response it belongs to, its name, or the key of its last block."""
    names: tuple[str, ...]
    """As what POST /v1/caches was told to keep it."""
    model: str | None
    tokens: int | None
    """Of the prompt; None if only its blocks are known."""
    cached_tokens: int
    """On disk, those of its answer included."""
    bytes: int
    created_at: float
    last_used_at: float
    expires_at: float | None
    """None while it is pinned."""
    pinned: bool
    prompt_cache_key: str | None
    tenant: str | None
    """The beginning of the tenant's digest; None for requests without API key and salt, and if unknown."""
    turns: int
    """Prompts of one conversation that this row stands for."""
    key: str
    """Of its last block."""


@dataclass(slots=True)
class Prompt:
    """One prompt and what it consists of."""

    chains: list[Chain]
    label: Label | None
    names: list[Label]
    turns: int = 1

    @property
    def longest(self) -> Chain:
        return max(self.chains, key=lambda chain: len(chain.blocks))

    @property
    def blocks(self) -> dict[bytes, Entry]:
        return {entry.found.key: entry for chain in self.chains for entry in chain.blocks}

    @property
    def last_used_at(self) -> float:
        """When its time to live was last renewed, or it was last answered, which its trace tells."""
        answered = [self.label.created_at] if self.label and not self.label.is_name else []
        return max([chain.last_used_at for chain in self.chains] + answered)

    def row(self) -> Row:
        longest, label = self.longest, self.label
        key = longest.leaf.found.key.hex()
        expires_at = max(chain.expires_at for chain in self.chains)
        pinned = any(chain.pinned for chain in self.chains)
        return Row(
            id=label.id if label else key[:16],
            names=tuple(sorted({name.id for name in self.names})),
            model=label.model if label else None,
            tokens=label.count if label else None,
            cached_tokens=longest.tokens,
            bytes=sum(entry.stored_bytes for entry in self.blocks.values()),
            created_at=longest.created_at,
            last_used_at=self.last_used_at,
            expires_at=expires_at if math.isfinite(expires_at) and not pinned else None,
            pinned=pinned,
            prompt_cache_key=(label.key or None) if label else None,
            tenant=label.tenant.hex()[:8] if label and label.tenant != DEFAULT_TENANT else None,
            turns=self.turns,
            key=key,
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """Records that a command is about."""

    entries: list[Entry]
    held: set[bytes]
    """Keys of those that are pinned for the sake of names that were not selected."""
    unknown: list[str]
    """What nothing is called."""


@dataclass(slots=True)
class Contents:
    """All that lies in a disk cache, read once."""

    blocks: list[Entry]
    named: list[Entry]
    labels: list[Label]
    chains: list[Chain] = field(default_factory=list)
    _on: dict[int, list[Chain]] = field(default_factory=dict)
    """By position in `labels`: the chains that have the prompt's blocks, as far as they are there."""

    @classmethod
    def read(cls, tier: NvmeTier) -> Contents:
        named = list(tier.entries(Kind.NAMED))
        labels = [label for entry in named if (label := _label(tier, entry)) is not None]
        contents = cls(list(tier.entries(Kind.BLOCK)), named, labels)
        contents.chains = chains(contents.blocks)
        contents._match()
        return contents

    def prompts(self) -> list[Prompt]:
        """One for each conversation, the last used first."""
        by_chain: dict[int, list[Label]] = defaultdict(list)
        for number, label in enumerate(self.labels):
            for chain in self._on[number]:
                by_chain[id(chain)].append(label)
        found: dict[object, Prompt] = {}
        for chain in self.chains:
            on = by_chain[id(chain)]
            best = _best(on, chain)
            prompt = found.setdefault(best.entry.found.key if best else id(chain), Prompt([], best, []))
            prompt.chains.append(chain)
            prompt.names += [label for label in on if label.is_name and label not in prompt.names]
        return sorted(_folded(list(found.values())), key=lambda prompt: prompt.last_used_at, reverse=True)

    def select(self, wanted: Sequence[str], key: str | None) -> Selection:
        """The prompts called so, or of this prompt_cache_key, and all that continues them."""
        unknown: list[str] = []
        labels = {n for n, label in enumerate(self.labels) if key is not None and label.key == key}
        chosen = {id(chain): chain for number in labels for chain in self._on[number]}
        shown = self.prompts()
        for text in wanted:
            hits = {n for n, label in enumerate(self.labels) if _is_called(label.id, text)}
            on = [chain for number in hits for chain in self._on[number]]
            on += [chain for chain in self.chains if _has_key(chain, text)]
            # A row stands for the earlier turns of its conversation too.
            on += [c for p in shown if p.label and _is_called(p.label.id, text) for c in p.chains]
            if not hits and not on:
                unknown.append(text)
            labels |= hits
            chosen |= {id(chain): chain for chain in on}
        for number, on in self._on.items():
            if on and all(id(chain) in chosen for chain in on) and not self.labels[number].is_pinned:
                labels.add(number)
        entries = {e.found.key: e for chain in chosen.values() for e in chain.blocks}
        entries |= {self.labels[n].entry.found.key: self.labels[n].entry for n in labels}
        held = self._held({n for n in range(len(self.labels)) if n not in labels})
        return Selection(list(entries.values()), held & entries.keys(), unknown)

    def _held(self, others: set[int]) -> set[bytes]:
        """Pinned blocks of the named prompts among `others`."""
        held: set[bytes] = set()
        for number in others:
            label = self.labels[number]
            if label.is_pinned:
                for chain in self._on[number]:
                    blocks = chain.blocks[: -(-label.count // (len(chain.leaf.content) // 4))]
                    held |= {block.found.key for block in blocks if block.found.pinned}
        return held

    def _match(self) -> None:
        """Find out which prompts lie on which chains."""
        steps = {len(block.content) // 4 for block in self.blocks if len(block.content) >= 4}
        ends: list[set[bytes]] = [
            {keys[-1] for step in steps if (keys := label.keys(step))} for label in self.labels
        ]
        wanted = set().union(*ends)
        through: dict[bytes, list[Chain]] = defaultdict(list)
        leaves: dict[bytes, list[Chain]] = defaultdict(list)
        prefixes: dict[bytes, bytes] = {}
        for chain in self.chains:
            prefix = NO_KEY
            for block in chain.blocks:
                known = prefixes.get(block.found.key)
                prefix = known or block_key(prefix, block.content)
                prefixes[block.found.key] = prefix
                if prefix in wanted:
                    through[prefix].append(chain)
            leaves[prefix].append(chain)
        for number, label in enumerate(self.labels):
            on = [chain for end in ends[number] for chain in through.get(end, ())]
            if not on and ends[number]:  # of a chain that lost its end, a part of the prompt may be left
                on = [
                    chain
                    for step in steps
                    for chain in next(
                        (leaves[key] for key in reversed(label.keys(step)) if key in leaves), ()
                    )
                ]
            self._on[number] = [chain for chain in on if _may_belong(label, chain)]


def _label(tier: NvmeTier, entry: Entry) -> Label | None:
    space, _, _ = entry.content.partition(b"\0")
    if space not in (NAMESPACE.encode(), NAMES.encode()):
        return None
    value = bytearray(entry.found.payload_bytes)
    try:
        tier.read(entry.found, Kind.NAMED, entry.identity, entry.content, memoryview(value))
        if space == NAMESPACE.encode():
            t = msgspec.msgpack.decode(value, type=Trace)
            return Label(entry, t.id, False, t.model, t.created_at, t.count, t.packed, t.key, t.turns)
        n = msgspec.msgpack.decode(value, type=NamedPrompt)
    except (TierFault, msgspec.DecodeError):
        return None
    name = entry.content.partition(b"\0")[2].decode("utf-8", "replace")
    return Label(entry, name, True, n.model, n.created_at, n.count, n.packed, n.key, is_pinned=n.pinned)


def _may_belong(label: Label, chain: Chain) -> bool:
    """Whether a chain can be the label's tenant's: of the default tenant that can be told."""
    first = chain.blocks[0]
    is_default = first.parent == root_key(first.identity, "")
    return is_default == (label.tenant == DEFAULT_TENANT)


def _best(labels: Sequence[Label], chain: Chain) -> Label | None:
    """The longest prompt, and a response rather than a name. Of tenants or models with the same prompt, that
    which was answered when the chain was last used; of equal requests the latest."""

    def rank(label: Label) -> tuple[int, bool, float]:
        return label.count, not label.is_name, -abs(label.created_at - chain.last_used_at)

    def origin(label: Label) -> tuple[object, ...]:
        return label.count, label.is_name, label.tenant, label.model

    best = max(labels, key=rank, default=None)
    equal = [label for label in labels if best is not None and origin(label) == origin(best)]
    return max(equal, key=lambda label: label.created_at, default=None)


def _folded(prompts: list[Prompt]) -> list[Prompt]:
    """Put earlier turns of a conversation to the latest one that continues them."""
    continued: dict[bytes, Prompt] = {}
    for prompt in prompts:
        for beginning in _beginnings(prompt):
            other = continued.get(beginning)
            if other is None or other.last_used_at < prompt.last_used_at:
                continued[beginning] = prompt
    kept: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda p: len(p.label.turns) if p.label else 0):
        *_, whole = _digests(prompt.label) if prompt.label and prompt.label.turns else (None,)
        later = continued.get(whole) if whole is not None else None
        if later is None:
            kept.append(prompt)
        else:
            later.chains += [chain for chain in prompt.chains if chain not in later.chains]
            later.names += [name for name in prompt.names if name not in later.names]
            later.turns += prompt.turns
    return kept


def _beginnings(prompt: Prompt) -> list[bytes]:
    return list(_digests(prompt.label))[:-1] if prompt.label else []


def _digests(label: Label) -> Iterator[bytes]:
    """A digest for each beginning of a conversation, by tenant and model."""
    digest = hashlib.blake2b(label.tenant + label.model.encode(), digest_size=16)
    for turn in label.turns:
        digest.update(msgspec.msgpack.encode(turn))
        yield digest.copy().digest()


def _is_called(id: str, wanted: str) -> bool:
    return id == wanted or (len(wanted) >= SHORTEST and id.startswith(wanted))


def _has_key(chain: Chain, wanted: str) -> bool:
    return len(wanted) >= SHORTEST and any(b.found.key.hex().startswith(wanted) for b in chain.blocks)
