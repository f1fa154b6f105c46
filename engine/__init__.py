"""The engine's narrow public door: requests in, deltas out. It knows nothing of HTTP."""

from .api import (
    Delta,
    DeltaIterator,
    Engine,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from .errors import (
    ContextTooLong,
    EngineDraining,
    EngineError,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    ModelError,
    RequestFailed,
)
from .params import SamplingParams

__all__ = [
    "ContextTooLong",
    "Delta",
    "DeltaIterator",
    "Engine",
    "EngineDraining",
    "EngineError",
    "EngineOverloaded",
    "EngineStatus",
    "EngineStopped",
    "FinishReason",
    "GenerationRequest",
    "InvalidRequest",
    "ModelError",
    "ModelInfo",
    "PositionLogprobs",
    "RequestFailed",
    "SamplingParams",
    "TokenLogprob",
    "Usage",
]
