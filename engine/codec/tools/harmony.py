"""Harmony of gpt-oss: an answer is messages, each with a head that tells its channel and to whom it goes.

`<|channel|>analysis<|message|>...<|end|>` is a thought, `<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>` a call; the rest is text. `<|start|>assistant` opens the next one.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ..segments import Reasoning, Segment
from .base import SPACE, Markers
from .call_machine import MAX_HEAD_CHARS, CallMachine
from .forms import CallForms

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_TO = "to="
_FUNCTIONS = "functions."
_ENDS = (END, CALL, RETURN)
_HEADS = Markers(START, CHANNEL, MESSAGE, CONSTRAIN, _TO + _FUNCTIONS, *_ENDS)
_HEAD_ENDS = re.compile("|".join(map(re.escape, (MESSAGE, *_ENDS))))
_BODY_ENDS = Markers(*_ENDS, START, CHANNEL)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(re.escape(_TO) + r"([\w.-]+)")
_BETWEEN_WORDS = re.compile(r"<\|\w*\|>|<\|\w*$|\s+")
_WORDS = ("assistant", "analysis", "commentary", "final", "json", _TO)

FORMS = CallForms(
    trigger=f" {_TO}{_FUNCTIONS}",
    begin=f" {_TO}{_FUNCTIONS}{{name}} {CONSTRAIN}json{MESSAGE}",
    end="",
    between=f"{END}{START}assistant",
)
"""No channel, so that it fits behind `assistant` as well as `commentary`; `<|call|>` ends the answer."""


class HarmonyParser(CallMachine):
    """Reads one answer.

    Args:
        names: The tools on offer; none: nothing is read as a call.
        prompt_end: The prompt's last text: the answer may go on with a message that stands there.
    """

    def __init__(self, names: Collection[str] = (), prompt_end: str = "") -> None:
        super().__init__(names)
        self._is_thought = False
        self._is_new = False
        """Nothing of this message has been given out."""
        self._said: set[bool] = set()
        """Whether there have been thoughts, and texts."""
        at = prompt_end.rfind(START)
        if at >= 0 and not prompt_end.rstrip().endswith(f"{START}assistant"):
            self.feed(prompt_end[at:])
        elif at < 0 and prompt_end:
            self.state = self._read_body

    def read_text(self) -> bool:
        """Between messages: what is no head is text."""
        solid = self.rest.lstrip(SPACE)
        marker = _HEADS.at_start(solid)
        if marker == "":
            return False
        if marker is None:
            return self._begin_message(is_thought=False)
        self.rest = solid
        if marker in _ENDS:
            self.rest = solid.removeprefix(marker)
        else:
            self.state = self._read_head
        return True

    def _read_head(self) -> bool:
        window = self.rest[:MAX_HEAD_CHARS]
        found = _HEAD_ENDS.search(window)
        if found is None:
            if len(window) < MAX_HEAD_CHARS:
                return False
            self._begin_message(is_thought=False)
            self._say(window)
            self.rest = self.rest[len(window) :]
            return True
        head, self.rest = window[: found.start()], self.rest[found.end() :]
        if found[0] != MESSAGE:
            self._drop(head)
            self.state = self.read_text
            return True
        head = head[max(0, head.rfind(START)) :]
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and self.names:
            name = recipient[1].removeprefix(_FUNCTIONS)
            if name != recipient[1] or name in self.names:
                return self.begin_arguments(name, _BODY_ENDS)
        told = channel[1] if channel else ""
        is_for_reader = told == "final" or (told != "analysis" and recipient is None)
        return self._begin_message(is_thought=not is_for_reader)

    def _drop(self, head: str) -> None:
        """A head that nothing follows says nothing, if it is one."""
        words = [word for word in _BETWEEN_WORDS.split(head) if word]
        if not all(word.startswith(_TO) or any(one.startswith(word) for one in _WORDS) for word in words):
            self._begin_message(is_thought=False)
            self._say(head)

    def _begin_message(self, *, is_thought: bool) -> bool:
        self._is_thought, self._is_new = is_thought, True
        self.state = self._read_body
        return True

    def _read_body(self) -> bool:
        before, marker, self.rest = _BODY_ENDS.split(self.rest)
        self._say(before)
        if marker is None:
            return False
        if marker not in _ENDS:
            self.rest = marker + self.rest
        self.state = self.read_text
        return True

    def _say(self, text: str) -> None:
        """Give out a piece of a message; an empty line parts it from the last of its kind."""
        if not text:
            return
        if self._is_new and self._is_thought in self._said:
            text = "\n\n" + text
        self._is_new = False
        self._said.add(self._is_thought)
        if self._is_thought:
            self.calls.add(Reasoning(text))
        else:
            self.calls.text(text)

    def read_behind(self) -> bool:
        self.state = self.read_text
        return True

    def finish(self) -> list[Segment]:
        if self.state == self._read_head:
            self._drop(self.rest)
            self.rest = ""
        elif self.state == self._read_body:
            self._say(self.rest)
            self.rest = ""
        return super().finish()
