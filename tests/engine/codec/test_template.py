"""Chat templates: what they are given, what is refused, and that they always end."""

from __future__ import annotations

from datetime import datetime
from time import monotonic

import pytest

from artesian.engine.codec import ChatTemplate, Conversation, ForcedTool, Message, TextPart, Tool, ToolCall
from artesian.engine.codec.template import CHATML
from artesian.engine.errors import InvalidRequest, ModelError

SYSTEM, USER = Message("system", "be brief"), Message("user", "hi")
CALL = Message("assistant", tool_calls=(ToolCall("call_1", "add", '{"a": 1, "b": "é"}'),))
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
STRICT = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System must come first!') }}{% endif %}
{%- if m.role == 'tool' %}{{ raise_exception('No tools here') }}{% endif %}
{{- '[' ~ m.role ~ ':' ~ m.content ~ ']' }}
{%- endfor %}"""
PARTS = """
{%- for m in messages %}{% for part in m['content'] %}
{%- if part['type'] == 'text' %}{{ m.role }}={{ part['text'] }};{% endif %}{% endfor %}{% endfor %}"""
CALLS = """
{%- for m in messages %}{% for call in m.tool_calls or [] %}
{{- call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{% endfor %}"""
CALLS_AS_TEXT = """
{%- for m in messages %}{% if m.content is none %}{% set f = m.tool_calls[0].function %}
{{- f.name + '(' + f.arguments + ')' }}{% endif %}{% endfor %}"""


def template(source: str, timeout_s: float = 5.0) -> ChatTemplate:
    return ChatTemplate(
        source, bos_token="<s>", eos_token="</s>", timeout_s=timeout_s, clock=lambda: datetime(2026, 11, 30)
    )


def render(source: str, *messages: Message) -> str:
    return template(source).render(Conversation(messages or (USER,)))


def test_chatml_renders_turns_and_the_generation_prompt() -> None:
    assert render(CHATML, SYSTEM, USER) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{{ {'é<': [1, 2]} | tojson }}", '{"é<": [1, 2]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "30 Nov 2026"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}", "7"),
        ("{% for m in messages %}{{ loop.last }}{{ loop.length }}{{ loop.index0 }}{% endfor %}", "True10"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "hi"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
    ],
)
def test_what_templates_rely_on_is_there(source: str, text: str) -> None:
    assert render(source) == text


def test_a_template_gets_its_keyword_arguments() -> None:
    conversation = Conversation((USER,))
    text = template("{{ enable_thinking }}").render(conversation, kwargs={"enable_thinking": False})
    assert text == "False"


def test_keyword_arguments_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest) as caught:
        template(PLAIN).render(Conversation((USER,)), kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_developer_is_system_to_a_template() -> None:
    assert render(PLAIN, Message("developer", "x")) == "[system:x]"


def test_parts_are_text_to_a_template_that_takes_text() -> None:
    assert render(PLAIN, Message("user", (TextPart("a"), TextPart("b")))) == "[user:ab]"


def test_text_is_parts_to_a_template_that_takes_parts() -> None:
    assert render(PARTS, USER, Message("user", "x")) == "user=hi;user=x;"


def test_a_template_that_takes_both_is_given_text() -> None:
    source = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    assert render(source) == "hi"


def test_arguments_are_an_object_to_a_template_that_writes_json() -> None:
    assert render(CALLS, USER, CALL) == 'add({"a": 1, "b": "é"})'


def test_arguments_are_text_to_a_template_that_joins_text() -> None:
    assert render(CALLS_AS_TEXT, USER, CALL) == 'add({"a": 1, "b": "é"})'


@pytest.mark.parametrize("arguments", ["{oops", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    call = Message("assistant", tool_calls=(ToolCall("1", "f", arguments),))
    source = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(source, call) == arguments


@pytest.mark.parametrize("source", [CHATML, PLAIN])
def test_a_missing_content_shows_as_nothing(source: str) -> None:
    assert "None" not in render(source, USER, CALL)


def test_a_template_that_looks_for_a_missing_content_finds_it() -> None:
    shown = "{{ 'call' if m.content is none and m.tool_calls else m.content }}"
    source = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    assert render(source, USER, CALL) == "hicall"


def test_reasoning_is_given_under_its_usual_names() -> None:
    message = Message("assistant", "4", reasoning="2+2")
    assert render("{{ messages[0].reasoning_content ~ messages[0].thinking }}", message) == "2+22+2"


def test_tools_are_given_as_functions() -> None:
    tools = (Tool("add", "Adds.", {"type": "object"}),)
    text = template("{{ tools | tojson }}").render(Conversation((USER,), tools, ForcedTool("add")))
    function = '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}'
    assert text == f'[{{"type": "function", "function": {function}}}]'


@pytest.mark.parametrize("conversation", [Conversation((USER,)), Conversation((USER,), (Tool("f"),), "none")])
def test_without_tools_on_offer_a_template_gets_none(conversation: Conversation) -> None:
    assert template("{{ tools is none }}").render(conversation) == "True"


def test_a_system_message_in_the_middle_moves_to_the_front_when_it_must() -> None:
    later = Message("developer", "no, be long")
    assert render(STRICT, SYSTEM, USER, later) == "[system:be brief\n\nno, be long][user:hi]"


def test_a_system_message_in_the_middle_stays_where_it_may() -> None:
    assert render(PLAIN, USER, SYSTEM) == "[user:hi][system:be brief]"


def test_two_users_in_a_row_and_an_assistant_first_are_the_templates_choice() -> None:
    assert render(STRICT, Message("assistant", "yo"), USER, USER) == "[assistant:yo][user:hi][user:hi]"


def test_the_templates_own_complaint_is_quoted() -> None:
    source = "{% if tools %}{{ raise_exception('No tools here') }}{% endif %}"
    with pytest.raises(InvalidRequest, match="No tools here") as caught:
        template(source).render(Conversation((USER,), (Tool("f"),)))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[9].content.x }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}"])
def test_a_fault_of_the_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses the messages"):
        render(source)


def test_a_final_message_is_continued_to_the_character() -> None:
    conversation = Conversation((USER, Message("assistant", "The answer ")))
    text = template(CHATML).render(conversation, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer ")


@pytest.mark.parametrize(
    ("source", "last", "generation", "message"),
    [
        (CHATML, "assistant", True, "exclude each other"),
        (CHATML, "user", False, "must be the assistant's"),
        ("{{ messages[0].content }}", "assistant", False, "does not show the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused(source: str, last: str, generation: bool, message: str) -> None:
    conversation = Conversation((USER, Message(last, "x")))
    with pytest.raises(InvalidRequest, match=message):
        template(source).render(conversation, add_generation_prompt=generation, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if range(99999) | list | length == 0 %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    ],
)
def test_an_endless_template_is_stopped(source: str) -> None:
    guarded = template("{% if go %}" + source + "{% endif %}", timeout_s=0.2)
    start = monotonic()
    with pytest.raises(InvalidRequest, match="too long"):
        guarded.render(Conversation((USER,)), kwargs={"go": True})
    assert monotonic() - start < 3.0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 'x' * 10 ** 9 }}", "too large"),
        ("{{ 9 ** 99999999 }}", "too large"),
        ("{{ [0] * 999999999 }}", "too large"),
        ("{% for i in range(1000000) %}{% endfor %}", "[Rr]ange"),
        ("{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}", "characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_the_sandbox_refuses_what_is_too_large_or_unsafe(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render(source)


def test_a_template_that_does_not_parse_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        template("\n{% for %}")
