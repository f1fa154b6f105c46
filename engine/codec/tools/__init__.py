"""Tool dialects: how models write calls, and the machines that read them."""

from . import dsml, hermes
from .base import new_call_id
from .dialect import ToolDialect
from .forms import CallForms, MemberForms

TOOL_DIALECTS = (
    ToolDialect(
        names=("deepseek_v41",),
        signs=((dsml.V41.block,),),
        markers=dsml.MARKERS,
        parser=dsml.DsmlParser,
        forms=dsml.V41_FORMS,
        reads_reasoning=True,
        thoughts=(dsml.THINK, dsml.THOUGHT),
    ),
    ToolDialect(
        names=("deepseek_v4",),
        signs=((dsml.V4.block,),),
        markers=dsml.MARKERS,
        parser=dsml.DsmlParser,
        forms=dsml.V4_FORMS,
        reads_reasoning=True,
        thoughts=(dsml.THINK, dsml.THOUGHT),
    ),
    ToolDialect(
        names=("hermes", "qwen3", "qwen2_5"),
        signs=(("<tool_call>",),),
        markers=(hermes.OPEN, hermes.CLOSE),
        parser=hermes.HermesParser,
        forms=hermes.FORMS,
    ),
)
"""The first row that fits counts; the last is for a model whose template shows none."""

__all__ = ["TOOL_DIALECTS", "CallForms", "MemberForms", "ToolDialect", "new_call_id"]
