"""Streaming over HTTP against llama-cpp-python's server, or any other: tokens/s and time to first token."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import Parameter
from rich.console import Console

from ...engine.load.sources import DEFAULT_MODEL
from ..cli import environment
from ..cli.models import find_model
from .load import Target
from .machine import cpu_seconds
from .peer_install import PEER, PEER_VERSION, llama_cpp_command, llama_cpp_python
from .report import Report, run_scenario
from .servers import artesian_command, child
from .summary import alternating
from .texts import Prompts, model_codec

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128
COLD_TOKENS = 512
CONTEXT = 2048
TOKENS_BAR = TTFT_BAR = 2.0

Samples = Callable[[Target, str], Awaitable[float]]


def peers(
    *,
    model: str = DEFAULT_MODEL,
    url: str | None = None,
    pairs: int = 10,
    quick: bool = False,
    threads: int = 0,
    json: Annotated[Path | None, Parameter(help="Where the JSON goes.")] = None,
) -> None:
    """Compare streaming with another server: the same requests, the same file, the same threads, in turns.

    Both servers are up all the time, but only one is asked at a time; pairs change their order.

    Parameters
    ----------
    model
        A GGUF file, or a name of the catalogue.
    url
        Compare with this server instead of building and starting llama-cpp-python's.
    pairs
        Alternating pairs of each single-stream measure.
    quick
        3 pairs, and no concurrent streams.
    threads
        Of each server; 0 = the cores this process may use.
    """
    pairs = 3 if quick else pairs
    threads = threads or len(os.sched_getaffinity(0))
    path = find_model(model, None, None)
    prompts = Prompts(model_codec(path).tokenizer)
    settings = {
        "model": path.name,
        "threads": threads,
        "decode": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "pairs": pairs},
        "cold": {"prompt_tokens": COLD_TOKENS, "output_tokens": 1, "pairs": pairs},
        "warm-up": "one request of each shape per server",
        "sampling": "greedy, ignore_eos",
    }
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(child(artesian_command(path, threads, "--no-access-log")))
        ours.wait_until_ok("/ready")
        sides = [Target.find("artesian", ours.url)]
        if url:
            sides.append(Target.find("peer", url))
            settings["peer"] = url
        else:
            python = llama_cpp_python(environment.home() / "bench")
            other = stack.enter_context(child(llama_cpp_command(python, path, threads, CONTEXT)))
            other.wait_until_ok("/v1/models")
            sides.append(Target.find(PEER, other.url))
            settings["peer"] = f"{PEER} {PEER_VERSION}"
        report = Report("peers", settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_compare(report, sides, prompts, pairs, [] if quick else [4, 8]))
        if not url:
            report.note(
                f"{PEER} runs one request at a time (the others wait), so several streams are no more than "
                "one after the other there."
            )
            report.measure("processor time, whole run", "artesian", "s", [cpu_seconds(ours.process.pid)])
            report.measure("processor time, whole run", PEER, "s", [cpu_seconds(other.process.pid)])
    report.finish(json)


def main(arguments: list[str]) -> None:
    run_scenario(peers, arguments)


async def _compare(
    report: Report, sides: list[Target], prompts: Prompts, pairs: int, concurrency: list[int]
) -> None:
    ours, theirs = (side.name for side in sides)

    async def decode(side: Target, prompt: str) -> float:
        return (await side.stream(prompt, OUTPUT_TOKENS)).decode_tokens_per_s

    async def cold(side: Target, prompt: str) -> float:
        return 1000 * (await side.stream(prompt, 1)).ttft_s

    counts = {}
    for tokens in (PROMPT_TOKENS, COLD_TOKENS):
        prompt = prompts.take(tokens)
        counts[tokens] = [await asyncio.to_thread(side.prompt_tokens, prompt) for side in sides]
    report.result.settings["prompt tokens as the servers count them"] = counts
    name = f"decode, 1 stream, {PROMPT_TOKENS} in {OUTPUT_TOKENS} out"
    await _pairs(report, name, "tokens/s", decode, sides, lambda: prompts.take(PROMPT_TOKENS), pairs)
    ratio = report.ratio(name, ours, theirs).median
    report.bar(f"decode against {theirs}, median ratio", ratio, f">= {TOKENS_BAR:g}", ratio >= TOKENS_BAR)
    name = f"time to first token, cold, {COLD_TOKENS} in"
    await _pairs(report, name, "ms", cold, sides, lambda: prompts.take(COLD_TOKENS), pairs)
    ratio = report.ratio(name, theirs, ours).median
    report.bar(f"first token against {theirs}, median ratio", ratio, f">= {TTFT_BAR:g}", ratio >= TTFT_BAR)
    for streams in concurrency:
        name = f"all tokens, {streams} streams, {PROMPT_TOKENS} in {OUTPUT_TOKENS} out"
        await _concurrent(report, name, sides, prompts, streams)
        report.ratio(name, ours, theirs)


async def _pairs(
    report: Report,
    name: str,
    unit: str,
    sample: Samples,
    sides: list[Target],
    next_prompt: Callable[[], str],
    pairs: int,
) -> None:
    """Both sides get the same prompt; which goes first changes from pair to pair."""
    samples: list[list[float]] = [[], []]
    with Console(stderr=True).status(name):
        warm = next_prompt()
        for side in sides:
            await sample(side, warm)
        for order in alternating(pairs):
            prompt = next_prompt()
            for index in order:
                samples[index].append(await sample(sides[index], prompt))
    for side, values in zip(sides, samples, strict=True):
        report.measure(name, side.name, unit, values)


async def _concurrent(report: Report, name: str, sides: list[Target], prompts: Prompts, streams: int) -> None:
    """Tokens of all streams over the time until the last has ended, prompts included; two pairs."""
    samples: list[list[float]] = [[], []]
    with Console(stderr=True).status(name):
        for order in alternating(2):
            texts = [prompts.take(PROMPT_TOKENS) for _ in range(streams)]
            for index in order:
                answers, seconds = await sides[index].streams(texts, OUTPUT_TOKENS)
                samples[index].append(sum(answer.tokens for answer in answers) / seconds)
    for side, values in zip(sides, samples, strict=True):
        report.measure(name, side.name, "tokens/s", values)
