"""Tool dialects: how models write calls, and the machines that read them."""

from . import deepseek_v3, dsml, harmony, hermes, llama, mistral, pythonic, tagged
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
        names=("openai", "harmony", "gpt_oss"),
        signs=((harmony.CHANNEL, harmony.MESSAGE),),
        markers=harmony.MARKERS,
        parser=harmony.HarmonyParser,
        forms=harmony.FORMS,
        reads_reasoning=True,
    ),
    ToolDialect(
        names=("deepseek_v3",),
        signs=((deepseek_v3.CALL, "```json"),),
        markers=deepseek_v3.MARKERS,
        parser=deepseek_v3.DeepSeekV3Parser,
        forms=deepseek_v3.FENCED_FORMS,
    ),
    ToolDialect(
        names=("deepseek_v31",),
        signs=((deepseek_v3.CALL,),),
        markers=deepseek_v3.MARKERS,
        parser=deepseek_v3.DeepSeekV3Parser,
        forms=deepseek_v3.FORMS,
    ),
    ToolDialect(
        names=("mistral_args",),
        signs=((mistral.OPEN, mistral.ARGS),),
        markers=mistral.MARKERS,
        parser=mistral.MistralParser,
        forms=mistral.FORMS,
    ),
    ToolDialect(
        names=("mistral",),
        signs=((mistral.OPEN,),),
        markers=mistral.MARKERS,
        parser=mistral.MistralParser,
        forms=mistral.ARRAY_FORMS,
    ),
    ToolDialect(
        names=("pythonic", "llama4_pythonic", "lfm2", "olmo3"),
        signs=(("[func_name1(",), ("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<function_calls>",)),
        markers=pythonic.MARKERS,
        parser=pythonic.PythonicParser,
    ),
    ToolDialect(
        names=("llama3_json", "llama4_json"),
        signs=(("<|start_header_id|>", '"parameters": '), ("<|header_start|>", '"parameters": ')),
        markers=llama.MARKERS,
        parser=llama.LlamaParser,
        forms=llama.FORMS,
    ),
    ToolDialect(
        names=("qwen3_coder", "qwen3_xml", "seed_oss"),
        signs=((tagged.QWEN.opens[0], tagged.QWEN.function), (tagged.QWEN.opens[1], tagged.QWEN.function)),
        markers=tagged.QWEN.markers,
        parser=tagged.qwen,
        forms=tagged.FORMS,
    ),
    ToolDialect(
        names=("glm45", "glm47"),
        signs=((tagged.GLM.parameter, tagged.GLM.value),),
        markers=tagged.GLM.markers,
        parser=tagged.glm,
        forms=tagged.FORMS,
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
