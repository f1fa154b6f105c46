"""The engine's knobs. A knob exists where two users need different values; the rest are constants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cache.config import CacheConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to serve and within which bounds. A value that cannot mean anything is a ValueError."""

    model: Path
    """A GGUF file or a Hugging Face folder (a name is resolved to a path before this point)."""
    served_name: str = ""
    """The name clients use; empty = the file's own name."""
    backend: Literal["auto", "cpu", "reference"] = "auto"
    """auto = cpu where it can run the model, else reference."""
    max_model_len: int = 0
    """Tokens of prompt and output together; 0 = what the model was trained for, within the KV budget."""
    max_num_seqs: int = 64
    """Sequences that may run at once."""
    max_num_queued_reqs: int = 256
    """Requests that may wait; one more is refused with a time to come back."""
    max_num_queued_tokens: int = 0
    """Prompt tokens that may wait; 0 = no limit."""
    step_budget_ms: float = 100.0
    """Estimated length of a step that decodes; prompts are cut to fit beside the decodes. Twice that when
    nothing decodes."""
    loop: Literal["overlap", "serial"] = "overlap"
    """overlap = plan the next step while the device runs this one; serial = one after the other."""
    threads: int = 0
    """Threads of the device; 0 = the cores this process may use."""
    chat_template: Path | None = None
    """A Jinja file instead of the model's own template."""
    derived_dir: Path | None = None
    """Where parsed metadata of model files is kept; None = nowhere."""
    seed: int | None = None
    """Seed of requests that bring none; None = random per request."""
    cache: CacheConfig = CacheConfig()

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs} must be at least 1")
        if not self.step_budget_ms > 0:
            raise ValueError(f"step_budget_ms={self.step_budget_ms} must be more than 0")
        for name in ("max_model_len", "max_num_queued_reqs", "max_num_queued_tokens", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
