"""What an answer shall look like, as OpenAI, vLLM, SGLang and llama.cpp spell it; and what of a schema holds.

Every spelling is honoured or refused by name; more than one in a request is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...engine import GrammarRefused
from ...engine.grammar import Choice, Finding, Grammar, JsonSchema, Lark, Regex, Tag, Tags
from ..errors import BadRequest
from ..service import Service
from .body import ignored_header
from .sampling import SamplingFields, read_fields
from .types import encode

AnySchema: TypeAlias = dict[str, Any] | bool
SchemaOrText: TypeAlias = dict[str, Any] | bool | str
"""vLLM and SGLang also take a schema as JSON text."""

JSON_OBJECT: AnySchema = {"type": "object"}


class TextFormat(msgspec.Struct, tag="text"):
    """Whatever the model writes."""


class JsonObjectFormat(msgspec.Struct, tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: AnySchema
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag="json_schema"):
    """JSON of a schema."""

    json_schema: SchemaFormat


class RegexFormat(msgspec.Struct, tag="regex"):
    """Text that matches; not OpenAI's."""

    pattern: str


class Structure(msgspec.Struct, kw_only=True):
    """A form in free text: a fixed text, JSON of a schema, a fixed text."""

    begin: Annotated[str, Meta(min_length=1)]
    schema: AnySchema
    end: str


class StructuralTagFormat(msgspec.Struct, tag="structural_tag"):
    """vLLM's and SGLang's: free text in which what a trigger opens is one of the structures."""

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=512)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=64)]


ResponseFormat: TypeAlias = (
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | StructuralTagFormat
)


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's `structured_outputs`: one of these."""

    json: SchemaOrText | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(SamplingFields, kw_only=True):
    """The fields of a request that may shape its answer, by one of these."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: SchemaOrText | None = None
    regex: str | None = None
    choice: list[str] | None = None
    ebnf: str | None = None
    grammar: str | None = None


class Asked(NamedTuple):
    """A grammar and the field that asked for it."""

    param: str
    grammar: Grammar
    places: tuple[str, ...] = ()
    """Of the schemas of its tags."""


def asked_grammar(fields: StructuredFields) -> Asked | None:
    """Return what a request asks for; None for free text.

    Raises:
        BadRequest: it asks twice, or gives a schema as a text that is no JSON.
    """
    asked = list(_asked(fields))
    if len(asked) > 1:
        raise _invalid(
            asked[1].param, f"{asked[0].param} and {asked[1].param} both shape the answer; give one"
        )
    return asked[0] if asked else None


async def prepare(service: Service, asked: Asked | None) -> list[str]:
    """Have the engine compile the grammar; returns what of it is not enforced.

    Raises:
        BadRequest: it cannot be; names the field and the place in the schema.
        EngineOverloaded: too many others are being compiled.
    """
    if asked is None:
        return []
    try:
        warnings = await service.engine.prepare(asked.grammar)
    except GrammarRefused as err:
        code = "invalid_value" if err.pointer is None else "invalid_json_schema"
        param = asked.param if err.tag is None else asked.places[err.tag]
        raise BadRequest(f"{param}: {err}", code=code, param=param) from None
    return [f"{asked.param}: {warning}" for warning in warnings]


def _asked(fields: StructuredFields) -> Iterator[Asked]:
    match fields.response_format:
        case JsonObjectFormat():
            yield Asked("response_format", JsonSchema(JSON_OBJECT))
        case JsonSchemaFormat(json_schema=given):
            yield Asked("response_format", JsonSchema(given.schema, strict=bool(given.strict)))
        case RegexFormat(pattern=pattern):
            yield Asked("response_format", Regex(pattern))
        case StructuralTagFormat() as given:
            yield _structures(given)
    outputs = fields.structured_outputs
    if outputs is not None:
        found = list(_outputs(outputs))
        if not found:
            raise _invalid("structured_outputs", "structured_outputs has no constraint in it")
        yield from found
    if fields.guided_json_object:
        yield Asked("guided_json_object", JsonSchema(JSON_OBJECT))
    for name in ("guided_json", "json_schema"):
        schema = getattr(fields, name)
        if schema is not None:
            yield Asked(name, JsonSchema(_schema(name, schema)))
    for name in ("guided_regex", "regex"):
        pattern = getattr(fields, name)
        if pattern is not None:
            yield Asked(name, Regex(pattern))
    for name in ("guided_choice", "choice"):
        texts = getattr(fields, name)
        if texts is not None:
            yield Asked(name, Choice(tuple(texts)))
    for name in ("guided_grammar", "ebnf", "grammar"):
        source = getattr(fields, name)
        if source is not None:
            yield Asked(name, Lark(source))


def _structures(given: StructuralTagFormat) -> Asked:
    for i, structure in enumerate(given.structures):
        if not structure.begin.startswith(tuple(given.triggers)):
            place = f"response_format.structures[{i}].begin"
            raise _invalid(place, f"{place} starts with none of the triggers")
    tags = tuple(Tag(one.begin, one.schema, one.end, strict=False) for one in given.structures)
    places = tuple(f"response_format.structures[{i}].schema" for i in range(len(tags)))
    return Asked("response_format", Tags(tags, tuple(given.triggers)), places)


def _outputs(outputs: StructuredOutputs) -> Iterator[Asked]:
    if outputs.json is not None:
        name = "structured_outputs.json"
        yield Asked(name, JsonSchema(_schema(name, outputs.json)))
    if outputs.regex is not None:
        yield Asked("structured_outputs.regex", Regex(outputs.regex))
    if outputs.choice is not None:
        yield Asked("structured_outputs.choice", Choice(tuple(outputs.choice)))
    if outputs.grammar is not None:
        yield Asked("structured_outputs.grammar", Lark(outputs.grammar))
    if outputs.json_object:
        yield Asked("structured_outputs.json_object", JsonSchema(JSON_OBJECT))


def _schema(param: str, given: SchemaOrText) -> AnySchema:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given, type=AnySchema)
    except (msgspec.DecodeError, RecursionError) as err:
        raise _invalid(param, f"{param} is a text that is no JSON schema: {err}") from None


def _invalid(param: str, message: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


class ValidateRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/schemas/validate`."""

    schema: AnySchema
    strict: bool = True
    """As in `response_format`: a keyword that is not enforced refuses the schema."""


class ValidateError(msgspec.Struct):
    message: str
    pointer: str | None


class ValidateAnswer(msgspec.Struct, kw_only=True):
    object: str = "schema.validation"
    accepted: bool
    """Whether a request with this schema would be served."""
    strict: bool
    error: ValidateError | None
    warnings: tuple[str, ...]
    keywords: tuple[Finding, ...]


class SchemasApi:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def validate(self, request: Request) -> Response:
        """POST /v1/schemas/validate."""
        service = self._service
        fields, ignored, _ = await read_fields(request, ValidateRequest, service.config)
        report = await service.engine.report_schema(fields.schema, strict=fields.strict)
        answer = ValidateAnswer(
            accepted=report.accepted,
            strict=fields.strict,
            error=None if report.error is None else ValidateError(report.error, report.pointer),
            warnings=report.warnings,
            keywords=report.keywords,
        )
        return Response(encode(answer), media_type="application/json", headers=ignored_header(ignored))
