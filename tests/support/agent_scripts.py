"""A scripted model for loops of tools: what it says follows from what the prompt already holds."""

from __future__ import annotations

from scripted_engine import Script, ScriptedEngine, toy_codec

from artesian.engine import GenerationRequest


def call(name: str, arguments: str) -> str:
    """A call as models write it (Hermes)."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def agent_engine(*steps: tuple[str, str], max_model_len: int = 20_000) -> ScriptedEngine:
    """An engine that says the text of the first step whose mark the prompt holds; every prompt holds ""."""

    def script_of(request: GenerationRequest) -> Script:
        said = toy_codec().detokenize(request.prompt)
        return Script(text=next(text for mark, text in steps if mark in said), tokens_per_step=5)

    return ScriptedEngine(toy_codec(), script_of, max_model_len=max_model_len)
