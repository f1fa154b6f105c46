"""The codec: conversation ⇄ prompt ⇄ tokens ⇄ text. It needs no torch and nothing else of the engine."""

from .codec import Codec
from .conversation import Conversation, ForcedTool, Message, Part, TextPart, Tool, ToolCall
from .detokenizer import Detokenizer
from .stops import StopMatcher, StopSet, StopStep
from .template import ChatTemplate
from .text_stream import TextDelta, TextStream
from .tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Codec",
    "Conversation",
    "Detokenizer",
    "ForcedTool",
    "Message",
    "Part",
    "StopMatcher",
    "StopSet",
    "StopStep",
    "TextDelta",
    "TextPart",
    "TextStream",
    "Tokenizer",
    "Tool",
    "ToolCall",
]
