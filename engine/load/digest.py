"""The identity of a model's function: a digest over its tensors' content and its resolved config.

A name, a path or a date never enters; token ids of the conversation do not either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ...kernels.backend import Tensor
from ..models.config import ModelConfig

DOMAIN = b"artesian weights 1\0"


def weights_digest(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str:
    """Return 64 hex digits over names, formats, shapes and bytes of `tensors` and over `config`.

    SHA-256 runs at 1-2 GB/s on a core with SHA instructions: about 0.1 s for 100 MB.
    """
    function = replace(config, eos_token_ids=(), bos_token_id=None)
    table = [(name, tensors[name].format, tensors[name].shape) for name in sorted(tensors)]
    head = msgspec.msgpack.encode((function, table), order="deterministic")
    digest = hashlib.sha256(DOMAIN + len(head).to_bytes(8, "little") + head)
    for name in sorted(tensors):  # lengths follow from the table, so the bytes need no separators
        digest.update(tensors[name].data.data)
    return digest.hexdigest()
