"""The engine's promises at its door, on a device that checks every KV entry it reads."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from fake_engine import EOS, VOCAB, collect, fake_runtime, running_engine
from fakes import FakeExecutor, expected_output

from artesian.engine import (
    ContextTooLong,
    EngineDraining,
    EngineOverloaded,
    EngineStopped,
    GenerationRequest,
    InvalidRequest,
    SamplingParams,
)
from artesian.engine.admission import slot_sampling
from artesian.engine.config import EngineConfig
from artesian.engine.local import LocalEngine
from artesian.kernels.sampling import is_finite, process_logits


def prompt_of(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(4, VOCAB) for _ in range(length)]


def device(engine: LocalEngine) -> FakeExecutor:
    executor = engine.runtime.executor
    assert isinstance(executor, FakeExecutor)
    return executor


async def run_mix(loop: str, window: int = 0) -> list[tuple[dict[int, str], dict[int, list[int]]]]:
    async with running_engine(fake_runtime(blocks=30, window=window), loop=loop) as engine:
        shared = prompt_of(1, 21)
        jobs = [
            collect(
                engine, f"r{i}", shared[: 5 + i] + prompt_of(i, i % 7 + 1), max_tokens=12 + i, n=1 + i % 3
            )
            for i in range(9)
        ]
        return [(r.text, r.tokens) for r in await asyncio.gather(*jobs)]


@pytest.mark.parametrize("window", [0, 6])
async def test_overlap_and_serial_loops_give_identical_tokens(window: int) -> None:
    overlap, serial = await run_mix("overlap", window), await run_mix("serial", window)
    assert overlap == serial


async def test_tokens_are_what_the_model_predicts_up_to_the_end_of_sequence() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(3, 10)
        result = await collect(engine, "a", prompt, max_tokens=40)
    assert result.tokens[0] == expected_output(prompt, 40, VOCAB, frozenset({EOS}))
    assert result.finish[0] == ("stop" if result.tokens[0][-1] == EOS else "length")


@pytest.mark.parametrize("length", range(1, 6))
async def test_end_found_late_costs_one_discarded_token_and_never_a_wrong_one(length: int) -> None:
    async with running_engine() as engine:
        prompt = prompt_of(4, 9)
        want = expected_output(prompt, length, VOCAB)
        result = await collect(engine, "a", prompt, max_tokens=30, stop_token_ids=(want[-1],))
        rows = device(engine).rows
    assert result.tokens[0] == want
    assert result.deltas[-1].stop_reason == want[-1]
    assert rows <= len(prompt) + length - 1 + 1


@pytest.mark.parametrize("length", range(1, 6))  # the end falls on every place in the pair of steps in flight
async def test_choice_that_ended_gets_nothing_more_while_the_others_go_on(length: int) -> None:
    async with running_engine() as engine:
        prompt = prompt_of(4, 9)
        want = expected_output(prompt, length, VOCAB)
        result = await collect(engine, "a", prompt, max_tokens=30, n=3, stop_token_ids=(want[-1],))
    assert result.tokens == {0: want, 1: want, 2: want}
    assert result.usage is not None and result.usage.completion_tokens == 3 * length


async def test_second_request_reuses_the_first_ones_blocks() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(5, 30)
        first = await collect(engine, "a", prompt, max_tokens=3)
        rows = device(engine).rows
        second = await collect(engine, "b", prompt, max_tokens=3)
        assert device(engine).rows - rows <= 1 + 3
    assert first.usage is not None and second.usage is not None
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (
        0,
        29,
    )  # all but the last token, which must be computed
    assert first.tokens == second.tokens


async def test_identical_prompts_that_arrive_together_are_computed_once() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(6, 60)
        await asyncio.gather(*(collect(engine, f"r{i}", prompt, max_tokens=2) for i in range(4)))
        assert device(engine).rows < 2 * len(prompt)


async def test_choices_share_the_prompt_that_the_first_computes() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(7, 50)
        result = await collect(engine, "a", prompt, max_tokens=4, n=4)
        assert device(engine).rows < 50 + 4 * 6
    assert sorted(result.finish) == [0, 1, 2, 3]
    assert result.usage is not None and result.usage.prompt_tokens == 50


async def test_salt_separates_prompts() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(8, 30)
        await collect(engine, "a", prompt, max_tokens=1)
        request = GenerationRequest(id="b", prompt=prompt, params=SamplingParams(max_tokens=1), salt="tenant")
        usage = [d.usage async for batch in engine.submit(request) for d in batch][-1]
    assert usage is not None and usage.cached_tokens == 0


async def test_closed_stream_frees_everything_within_a_step() -> None:
    async with running_engine() as engine:
        request = GenerationRequest(id="a", prompt=prompt_of(9, 40), params=SamplingParams(max_tokens=50))
        stream = engine.submit(request)
        await anext(stream)
        await stream.aclose()
        await collect(engine, "b", prompt_of(10, 5), max_tokens=1)
        assert engine.status().running == 0


async def test_aborted_request_ends_with_reason_abort_and_its_usage() -> None:
    async with running_engine() as engine:
        request = GenerationRequest(
            id="a", prompt=prompt_of(9, 20), params=SamplingParams(max_tokens=60, n=2)
        )
        stream = engine.submit(request)
        await anext(stream)
        engine.abort("a")
        engine.abort("a")
        deltas = [delta async for batch in stream for delta in batch]
    assert [d.finish_reason for d in deltas[-2:]] == ["abort", "abort"]
    assert deltas[-1].usage is not None and deltas[-1].usage.prompt_tokens == 20


async def test_500_random_aborts_at_twice_the_capacity_leave_nothing_behind() -> None:
    async with running_engine(fake_runtime(blocks=45), max_num_queued_reqs=1000) as engine:
        rng = random.Random(0)

        async def one(index: int) -> None:
            params = SamplingParams(max_tokens=rng.randrange(1, 30), n=rng.randrange(1, 3))
            prompt = prompt_of(rng.randrange(5), 12) + prompt_of(index, rng.randrange(20))
            stream = engine.submit(GenerationRequest(id=str(index), prompt=prompt, params=params))
            for _ in range(rng.randrange(12)):
                if await anext(stream, None) is None:
                    return
            await stream.aclose()

        gate = asyncio.Semaphore(8)

        async def gated(index: int) -> None:
            async with gate:
                await one(index)

        await asyncio.gather(*(gated(i) for i in range(500)))


async def test_preempted_sequences_give_the_same_tokens() -> None:
    async with running_engine(fake_runtime(blocks=26, max_len=64)) as engine:
        prompts = [prompt_of(i, 20) for i in range(4)]
        results = await asyncio.gather(
            *(collect(engine, str(i), p, max_tokens=40, ignore_eos=True) for i, p in enumerate(prompts))
        )
        assert engine._scheduler.preemptions > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens[0] == expected_output(prompt, 40, VOCAB)


async def test_failed_step_fails_its_requests_and_the_next_request_works() -> None:
    async with running_engine() as engine:
        device(engine).fail_next = RuntimeError("device lost")
        failed = await collect(engine, "a", prompt_of(1, 8), max_tokens=5)
        worked = await collect(engine, "b", prompt_of(1, 8), max_tokens=5)
    assert (failed.finish[0], failed.deltas[-1].error_code) == ("error", "failed")
    assert worked.finish[0] in ("length", "stop")


async def test_engine_whose_loop_has_failed_says_so_and_fails_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LocalEngine(fake_runtime(), EngineConfig(model=Path("fake")))
    await engine.start()
    running = asyncio.create_task(collect(engine, "a", prompt_of(1, 8), max_tokens=50, ignore_eos=True))
    await asyncio.sleep(0)
    monkeypatch.setattr(engine._scheduler, "plan", Mock(side_effect=RuntimeError("a bug")))
    assert (await running).finish[0] == "error"
    assert not engine.status().healthy
    with pytest.raises(EngineStopped):
        engine.submit(GenerationRequest(id="b", prompt=[5], params=SamplingParams()))
    await engine.close()


async def test_full_queue_refuses_with_a_time_to_come_back() -> None:
    async with running_engine(max_num_queued_reqs=2) as engine:
        streams = [
            engine.submit(GenerationRequest(id=str(i), prompt=prompt_of(i, 30), params=SamplingParams()))
            for i in range(6)
        ]
        with pytest.raises(EngineOverloaded) as refusal:
            engine.submit(GenerationRequest(id="late", prompt=[5], params=SamplingParams()))
        assert 1.0 <= refusal.value.retry_after_s <= 60.0
        for stream in streams:
            await stream.aclose()


async def test_waiting_requests_know_their_place_by_priority() -> None:
    async with running_engine(fake_runtime(slots=2)) as engine:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        streams = [
            engine.submit(
                GenerationRequest(
                    id=f"r{i}", prompt=prompt_of(i, 5), params=params, priority=-1 if i == 4 else 0
                )
            )
            for i in range(5)
        ]
        assert [engine.queue_position(f"r{i}") for i in range(5)] == [0, 1, 2, 3, 0]
        await anext(aiter(streams[4]))
        assert [engine.queue_position(f"r{i}") for i in range(5)] == [0, 1, 2, 3, 0]
        assert engine.queue_position("unknown") == 0
        for stream in streams:
            await stream.aclose()


async def test_a_prompts_estimate_falls_with_what_is_cached() -> None:
    async with running_engine() as engine:
        estimates = [engine.prompt_s(80, cached) for cached in (0, 40, 79)]
        assert estimates[0] > estimates[1] > estimates[2] > 0


async def test_deadline_fails_what_is_left_of_a_request() -> None:
    async with running_engine() as engine:
        request = GenerationRequest(
            id="a", prompt=prompt_of(1, 8), deadline_s=0.0,
            params=SamplingParams(max_tokens=80, n=8, ignore_eos=True),
        )  # fmt: skip
        deltas = [delta async for batch in engine.submit(request) for delta in batch]
    assert (deltas[-1].finish_reason, deltas[-1].error_code) == ("error", "deadline")


async def test_drain_lets_requests_finish_and_takes_nothing_new() -> None:
    async with running_engine() as engine:
        running = asyncio.create_task(collect(engine, "a", prompt_of(1, 8), max_tokens=30, ignore_eos=True))
        await asyncio.sleep(0)
        draining = asyncio.create_task(engine.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDraining):
            engine.submit(GenerationRequest(id="b", prompt=[5], params=SamplingParams()))
        assert await draining
        assert (await running).finish[0] == "length"


async def test_drain_cuts_what_outlasts_its_timeout() -> None:
    async with running_engine() as engine:
        running = asyncio.create_task(
            collect(engine, "a", prompt_of(1, 8), max_tokens=80, n=16, ignore_eos=True)
        )
        await asyncio.sleep(0)
        assert not await engine.drain(0.0)
        assert set((await running).finish.values()) <= {"error", "length"}


async def test_stop_string_is_cut_from_the_text() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(11, 12)
        free = await collect(engine, "a", prompt, max_tokens=30, ignore_eos=True)
        stop = free.text[0][5:8]
        cut = await collect(engine, "b", prompt, max_tokens=30, ignore_eos=True, stop=(stop,))
    assert cut.text[0] == free.text[0][: free.text[0].index(stop)]
    assert (cut.finish[0], cut.deltas[-1].stop_reason) == ("stop", stop)


async def test_prompt_logprobs_cover_every_prompt_token_once() -> None:
    async with running_engine() as engine:
        prompt = prompt_of(12, 45)
        await collect(engine, "warm", prompt, max_tokens=1)
        result = await collect(engine, "a", prompt, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    scored = [d.prompt_logprobs for d in result.deltas if d.prompt_logprobs is not None]
    assert len(scored) == 1 and scored[0][0] is None
    assert [p.chosen.token_id for p in scored[0][1:] if p is not None] == prompt[1:]


async def test_no_tokens_wanted_ends_after_the_prompt() -> None:
    async with running_engine() as engine:
        result = await collect(engine, "a", prompt_of(13, 20), max_tokens=0, prompt_logprobs=0)
    assert (result.tokens.get(0, []), result.finish[0]) == ([], "length")
    assert result.deltas[-1].prompt_logprobs is not None and len(result.deltas[-1].prompt_logprobs) == 20


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([5], {"logit_bias": {10**9: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([5], {"allowed_token_ids": ()}, "allowed_token_ids"),
        ([5], {"logprobs": 21}, "logprobs"),
        ([5], {"n": 0}, "n"),
        ([5], {"min_tokens": 2**63}, "messages"),
    ],
)
async def test_impossible_request_is_refused_by_name(
    prompt: list[int], params: dict[str, object], param: str
) -> None:
    async with running_engine() as engine:
        request = GenerationRequest(id="a", prompt=prompt, params=SamplingParams(**params))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as refusal:
            engine.submit(request)
        assert refusal.value.param == param
        await collect(engine, "b", [5, 6], max_tokens=1)


@pytest.mark.parametrize("top_k", [VOCAB + 1, 2**31, 2**63])
async def test_a_top_k_beyond_the_vocabulary_is_off(top_k: int) -> None:
    prompt = prompt_of(14, 6)
    async with running_engine() as engine:
        limited = await collect(engine, "a", prompt, max_tokens=3, top_k=top_k)
        free = await collect(engine, "b", prompt, max_tokens=3)
    assert limited.tokens == free.tokens != {}


def test_the_smallest_repetition_penalty_keeps_logits_finite() -> None:
    params = SamplingParams(repetition_penalty=1e-320)
    sampling = slot_sampling(params, 0, 1, frozenset(), VOCAB)
    logits = process_logits(np.full(VOCAB, 1000.0, np.float32), sampling, np.array([5], np.int32))
    assert is_finite(logits) and logits.argmax() == 5


async def test_context_limit_is_told_with_true_numbers_and_its_last_token_is_usable() -> None:
    async with running_engine() as engine:
        full = prompt_of(1, engine.model.max_model_len)
        with pytest.raises(ContextTooLong) as refusal:
            engine.submit(GenerationRequest(id="a", prompt=full, params=SamplingParams()))
        assert (refusal.value.prompt_tokens, refusal.value.limit) == (96, 96)
        result = await collect(engine, "b", full[:-1], ignore_eos=True)
    assert len(result.tokens[0]) == 1 and result.finish[0] == "length"
