"""Run by an environment that has `instructor`: extracts models from a server's answers, prints them as JSON.

Arguments: the server's URL, the model's name.
"""

import json
import sys
from typing import Any

import instructor
import openai
import pydantic


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def main(url: str, model: str) -> None:
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Ann is 31 years old."}],
        "temperature": 1.2,
        "seed": 3,
        "max_tokens": 100,
        "max_retries": 0,
    }
    found = {}
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        found[mode] = client.create(response_model=Person, **asked).model_dump()
        partial = [one.model_dump() for one in client.create_partial(response_model=Person, **asked)]
        found[f"{mode} in parts"] = partial[-1]
    sys.stdout.write(json.dumps(found))


main(*sys.argv[1:])
