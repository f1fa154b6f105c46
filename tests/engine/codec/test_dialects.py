"""Which dialect a chat template shows, and what overrides it."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_level, codec_of

from artesian.engine.codec.dialects import UnknownDialect, find_dialect

TOKENIZER = codec_of(byte_level()).tokenizer
DEEPSEEK = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + {} + '<｜tool▁sep｜>'"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>'", "openai"),
        (DEEPSEEK.format("tool['type']") + " + name + '\\n' + '```json'", "deepseek_v3"),
        (DEEPSEEK.format("name") + " + arguments", "deepseek_v31"),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", "mistral_args"),
        ("'[TOOL_CALLS] [' + calls + ']'", "mistral"),
        ("Respond in the format [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("'<|tool_call_start|>[' + calls + ']<|tool_call_end|>'", "lfm2"),
        ("'<|start_header_id|>assistant' '{\"name\": \"' + name + '\", ' '\"parameters\": '", "llama3_json"),
        ("'<|header_start|>assistant' '{\"name\": \"' + name + '\", ' '\"parameters\": '", "llama4_json"),
        ("'<|start_header_id|>' + role + '<|end_header_id|>'", "hermes"),
        ("'<tool_call>\\n<function=' + name + '>\\n'", "qwen3_coder"),
        ("'<seed:tool_call>\\n<function=' + name + '>\\n'", "seed_oss"),
        ("'<tool_call>' + name + '<arg_key>' + k + '</arg_key>\\n<arg_value>' + v", "glm45"),
        ("'<tool_call>\\n' + call + '\\n</tool_call>'", "hermes"),
        ("no tools at all", "hermes"),
        (None, "hermes"),
    ],
)
def test_a_template_shows_its_dialect(template: str | None, name: str) -> None:
    assert name in find_dialect(template, TOKENIZER).tools.names


def test_a_template_that_tells_no_tools_leaves_calls_to_hermes() -> None:
    found = find_dialect(DEEPSEEK.format("name"), TOKENIZER, shows_tools=False)
    assert "hermes" in found.tools.names
    found = find_dialect("<|channel|>final<|message|>", TOKENIZER, shows_tools=False)
    assert "openai" in found.tools.names


def test_names_override_the_template() -> None:
    found = find_dialect("[TOOL_CALLS] </think>", TOKENIZER, tool_call_parser="pythonic")
    assert "pythonic" in found.tools.names
    assert found.reasoning is not None
    found = find_dialect("[TOOL_CALLS] </think>", TOKENIZER, reasoning_parser="mistral")
    assert "mistral" in found.tools.names
    assert found.reasoning is not None
    assert found.reasoning.close == "[/THINK]"
    assert find_dialect("</think>", TOKENIZER, reasoning_parser="none").reasoning is None


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_refused_with_those_there_are(field: str) -> None:
    with pytest.raises(UnknownDialect, match=f"^{field}='x' is unknown; expected one of .*, mistral"):
        find_dialect(None, TOKENIZER, shows_tools=True, **{field: "x"})
