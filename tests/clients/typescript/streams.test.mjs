// Chat streams: typed events, the whole answer, and every way a stream can end.
import assert from "node:assert/strict";
import test from "node:test";

import * as sdk from "../../../clients/typescript/dist/index.js";
import { EventParser } from "../../../clients/typescript/dist/sse.js";
import { answersURL, calling, delta, events, hello, script, seen } from "./answers.mjs";

const scripted = new sdk.Client({ baseURL: answersURL, sleep: async () => undefined });
const ours = new sdk.Client({ baseURL: process.env.ARTESIAN_URL, apiKey: "one" });

test("events are the same wherever the bytes are cut", () => {
  const bytes = new TextEncoder().encode(
    ": ping\n\r\ndata: one\r\ndata:two\r\nid: 7\r\n\nevent: x\rdata: é😊\r\rdata\n\ndata: half",
  );
  const expected = [
    { data: "one\ntwo", event: "", id: "7" },
    { data: "é😊", event: "x", id: "7" },
    { data: "", event: "", id: "7" },
  ];
  for (let first = 0; first <= bytes.length; first++) {
    for (let second = first; second <= bytes.length; second++) {
      const parser = new EventParser();
      const parts = [bytes.slice(0, first), bytes.slice(first, second), bytes.slice(second)];
      assert.deepEqual(parts.flatMap((part) => parser.feed(part)), expected);
    }
  }
});

test("reasoning, text and calls become typed events and one answer", async () => {
  await script(
    events([
      delta({ role: "assistant", content: "" }),
      delta({ reasoning_content: "hm" }),
      delta({ content: "So" }),
      ...calling(["call_1", "f", '{"a":1}'], ["call_2", "g", "{}"]),
      { choices: [], usage: { prompt_tokens: 5 }, prompt_cache_diagnostics: { type: "cache_hit" } },
    ]),
  );
  const stream = scripted.chat.stream({ messages: hello });
  const types = [];
  for await (const event of stream) types.push(event.type);
  assert.deepEqual(types, [
    "reasoning_delta", "content_delta",
    "tool_call_begun", "tool_arguments_delta", "tool_arguments_delta", "tool_call_done",
    "tool_call_begun", "tool_arguments_delta", "tool_arguments_delta", "tool_call_done",
    "choice_done", "usage",
  ]);
  const answer = await stream.answer();
  const { message } = answer.choices[0];
  assert.deepEqual([message.reasoning_content, message.content], ["hm", "So"]);
  assert.deepEqual(message.tool_calls.map((call) => [call.id, call.function.name, call.function.arguments]), [
    ["call_1", "f", '{"a":1}'],
    ["call_2", "g", "{}"],
  ]);
  assert.equal(answer.prompt_cache_diagnostics.type, "cache_hit");
  assert.equal(answer.request_id, "req_1");
  assert.deepEqual((await seen())[0].body.stream_options, { include_usage: true });
});

for (const drop of [true, false]) {
  test(`a stream that breaks off (drop: ${drop}) is an error and keeps what came`, async () => {
    await script(events([delta({ content: "Hel" })], { done: false, drop }));
    const stream = scripted.chat.stream({ messages: hello });
    await assert.rejects(stream.answer(), (error) => error instanceof sdk.StreamError && error.requestId === "req_1");
    assert.equal(stream.partial.choices[0].message.content, "Hel");
    assert.equal((await seen()).length, 1);
  });
}

test("something else than a stream is an error", async () => {
  await script({ pieces: ["data: <html>\n\n"] });
  await assert.rejects(scripted.chat.stream({ messages: hello }).answer(), sdk.APIResponseError);
});

test("a stream is opened again before its first byte", async () => {
  await script({ status: 503, body: {} }, events([delta({ content: "Hi" }, "stop")]));
  let text = "";
  for await (const piece of scripted.chat.stream({ messages: hello }).texts()) text += piece;
  assert.equal(text, "Hi");
});

test("a silent stream is a timeout", async () => {
  await script(events([delta({ content: "Hi" }, "stop")], { pause_s: 5 }));
  const stream = scripted.chat.stream({ messages: hello }, { timeoutMs: 100 });
  await assert.rejects(stream.answer(), /No answer within 100 ms/);
});

test("a stream of our server equals its whole answer", async () => {
  const request = { messages: hello, n: 2, logprobs: true, return_token_ids: true };
  const whole = await ours.chat.create(request);
  const streamed = await ours.chat.stream(request).answer();
  assert.equal(whole.choices[0].message.content, "Hé 😊!");
  for (const part of [
    (choice) => choice.message.content,
    (choice) => choice.finish_reason,
    (choice) => choice.logprobs.content,
    (choice) => choice.token_ids,
  ]) {
    assert.deepEqual(streamed.choices.map(part), whole.choices.map(part));
  }
  assert.deepEqual(streamed.usage, whole.usage);
  assert.ok(streamed.prompt_cache_diagnostics.type);
});

test("leaving the loop ends the request in the server", async () => {
  const running = async () => {
    const text = await (await fetch(`${process.env.ARTESIAN_URL}/metrics`)).text();
    return Number(/^artesian_client_disconnects_total\S* (\S+)$/m.exec(text)[1]);
  };
  const before = await running();
  for await (const event of ours.chat.stream({ messages: hello, ignore_eos: true, max_tokens: 3000 })) {
    if (event.type === "content_delta") break;
  }
  const until = Date.now() + 5000;
  while ((await running()) === before) assert.ok(Date.now() < until, "the request goes on");
});

test("a refusal of our server is thrown where the stream is read", async () => {
  await assert.rejects(ours.chat.stream({ messages: hello, temperature: 9 }).answer(), (error) => {
    return error instanceof sdk.BadRequestError && error.param === "temperature" && error.requestId.startsWith("req_");
  });
});

test("completions and models are read", async () => {
  assert.equal((await ours.complete({ prompt: "hi" })).choices[0].text, "Hé 😊!");
  assert.deepEqual((await ours.models()).data.map((model) => model.id), ["scripted"]);
});

test("a lost chat goes on behind its last event", async () => {
  const part = (number, chunk, rest) => {
    const { pieces } = events([chunk], rest);
    return { pieces: [`id: chatcmpl-1:${number}\n${pieces[0]}`, ...pieces.slice(1)], ...rest };
  };
  await script(
    part(0, delta({ content: "Hel" }), { done: false, drop: true }),
    { status: 503, body: {} },
    part(1, delta({ content: "lo" }, "stop"), {}),
  );
  const stream = scripted.chat.stream({ messages: hello, cache_salt: "s" }, { resume: true });
  assert.equal((await stream.answer()).choices[0].message.content, "Hello");
  const [first, ...others] = await seen();
  assert.deepEqual(first.body.stream_options, { include_usage: true, resume: true });
  assert.deepEqual(
    others.map((request) => request.path),
    Array(2).fill("/v1/streams/chatcmpl-1?starting_after=0&cache_salt=s"),
  );
});

test("our server's resumable chat is read to its end", async () => {
  const stream = ours.chat.stream({ messages: hello }, { resume: true });
  assert.equal((await stream.answer()).choices[0].message.content, "Hé 😊!");
});
