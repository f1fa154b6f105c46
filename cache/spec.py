"""The identity of cached KV: two prompts may share a block only if all that shaped its bytes is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from ..kernels.kv import KVSpec

FORMAT_VERSION = 2
"""Raised whenever the meaning of a stored block changes."""
KEY_BYTES = 32


def layout_digest(
    weights_digest: str, groups: Iterable[KVSpec], kv_layout: str, adapter_digest: str = ""
) -> bytes:
    """Digest of all that is common to every block of a loaded model: weights, adapter, KV layout and
    dtype, the device's own layout (`Executor.kv_layout`), format version. Each part is tagged with its
    domain, so that no two parts can trade places."""
    digest = hashlib.blake2b(digest_size=32, person=b"artesian-layout")
    _part(digest, b"version", str(FORMAT_VERSION).encode())
    _part(digest, b"weights", weights_digest.encode())
    _part(digest, b"adapter", adapter_digest.encode())
    _part(digest, b"device", kv_layout.encode())
    for group in groups:
        _part(digest, b"group", repr(group).encode())
    return digest.digest()


def root_key(layout: bytes, salt: str) -> bytes:
    """Key of the empty prefix of one tenant (`salt`; empty = shared by all without one)."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"artesian-root")
    _part(digest, b"layout", layout)
    _part(digest, b"salt", salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


def block_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[list[bytes], list[bytes]]:
    """Chained keys of all full blocks of `tokens`, and each block's tokens as int32 bytes.

    key_i = H(key_{i-1} || tokens of block i), key_{-1} = root.
    """
    data = np.asarray(tokens, dtype="<i4").tobytes()
    step = 4 * block_tokens
    contents = [data[i : i + step] for i in range(0, len(data) - step + 1, step)]
    keys: list[bytes] = []
    parent = root
    for content in contents:
        parent = block_key(parent, content)
        keys.append(parent)
    return keys, contents


def block_key(parent: bytes, content: bytes) -> bytes:
    """Key of the block with these tokens (int32 bytes) behind the block, or root, of key `parent`."""
    return hashlib.blake2b(parent + content, digest_size=KEY_BYTES, person=b"artesian-block").digest()


def tenant_digest(salt: str) -> bytes:
    """Identity of one tenant's named records: they belong to no model."""
    digest = hashlib.blake2b(digest_size=32, person=b"artesian-tenant")
    _part(digest, b"salt", salt.encode("utf-8", "surrogatepass"))
    return digest.digest()


def named_key(tenant: bytes, content: bytes) -> bytes:
    """Key of a tenant's named record; `content` has its namespace and name."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"artesian-named")
    _part(digest, b"tenant", tenant)
    _part(digest, b"content", content)
    return digest.digest()


def _part(digest: hashlib.blake2b, tag: bytes, value: bytes) -> None:
    for field in (tag, value):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
