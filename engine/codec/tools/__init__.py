"""Tool dialects: how models write calls, and the machines that read them."""

from . import hermes
from .base import new_call_id
from .dialect import ToolDialect
from .forms import CallForms

TOOL_DIALECTS = (
    ToolDialect(
        names=("hermes", "qwen3", "qwen2_5"),
        signs=(("<tool_call>",),),
        markers=(hermes.OPEN, hermes.CLOSE),
        parser=hermes.HermesParser,
        forms=hermes.FORMS,
    ),
)
"""The first row that fits counts; the last is for a model whose template shows none."""

__all__ = ["TOOL_DIALECTS", "CallForms", "ToolDialect", "new_call_id"]
