"""One model's codec: its tokenizer and its chat template together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from ..errors import ContextTooLong, InvalidRequest
from .conversation import Conversation
from .deepseek import template_of
from .guard import Guard
from .template import CHATML, ChatTemplate, PromptTemplate
from .tokenizer import Tokenizer
from .unicode import require_unicode


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoding and rendering take up to seconds for megabytes of text: callers run them off the loop."""

    tokenizer: Tokenizer
    template: PromptTemplate | None
    """None for a model that is not made for chat."""
    _guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        names = (self.tokenizer.token_name(token_id) or "" for token_id in self.tokenizer.special_ids)
        object.__setattr__(self, "_guard", Guard(names))

    @classmethod
    def build(
        cls,
        hf_tokenizer: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None,
        eos_token_ids: Sequence[int],
        add_bos: bool,
        add_eos: bool,
        special_ids: Collection[int],
        chat_template: str | None,
    ) -> Codec:
        """Build from what a model file says. Without a template, its vocabulary tells: DeepSeek's prompts, or
        ChatML if it has the markers.

        Raises:
            ModelError: the tokenizer's decoder is not supported or the template is not valid.
        """
        tokenizer = Tokenizer(
            hf_tokenizer,
            bos_token_id=bos_token_id,
            eos_token_ids=eos_token_ids,
            add_bos=add_bos,
            add_eos=add_eos,
            special_ids=special_ids,
        )
        own = None if chat_template else template_of(tokenizer)
        if own is not None:
            return cls(tokenizer, own)
        has_chatml = None not in (tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>"))
        source = chat_template or (CHATML if has_chatml else None)
        if source is None:
            return cls(tokenizer, None)
        eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
        template = ChatTemplate(
            source,
            bos_token=tokenizer.token_name(bos_token_id),
            eos_token=tokenizer.token_name(eos_token_id),
        )
        return cls(tokenizer, template)

    def render_chat(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, see `ChatTemplate.render`.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the conversation.
        """
        if self.template is None:
            raise InvalidRequest("This model has no chat template; use completions instead", "messages")
        return self.template.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    def encode_chat(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """The prompt's ids: one BOS if the vocabulary asks for it, whether or not the template writes it;
        never an EOS that the template did not write. Names of special tokens in what users and tools say are
        ordinary text.

        Raises:
            InvalidRequest: as `render_chat`.
            ContextTooLong: as `encode_prompt`.
        """
        text = self.render_chat(
            self._guard.guarded(conversation),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        require_unicode(text, "messages")  # a tool's schema is the one text not checked before
        self._check_length(text, limit, "messages")
        ids: list[int] = []
        for piece, is_control in self._guard.pieces(text):
            ids += self.tokenizer.encode(piece, add_special=False, parse_special=is_control)
        return self.tokenizer.with_bos(ids)

    def encode_prompt(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        """The ids of a plain prompt.

        Raises:
            InvalidRequest: a lone surrogate in the text.
            ContextTooLong: the text has far more tokens than `limit`; found without encoding all of it.
        """
        require_unicode(text, "prompt")
        self._check_length(text, limit, "prompt")
        return self.tokenizer.encode(text, add_special=add_special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids, the inverse of `encode_prompt` (which adds special tokens)."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def _check_length(self, text: str, limit: int | None, param: str) -> None:
        if limit is not None and self.tokenizer.exceeds(text, limit):
            raise ContextTooLong(limit + 1, limit, param=param, is_least=True)

    def label(self, token_id: int) -> str:
        """A token as logprobs name it: its text, or its bytes as `\\xf0\\x9f` (OpenAI's form) if they are
        not whole characters."""
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in data)
