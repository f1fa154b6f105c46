// Responses: remembered turns, background, streams that are taken up again.
import assert from "node:assert/strict";
import test from "node:test";

import * as sdk from "../../../clients/typescript/dist/index.js";
import { answersURL, script, seen } from "./answers.mjs";

const ours = new sdk.Client({ baseURL: process.env.ARTESIAN_URL, apiKey: "one" });
const scripted = new sdk.Client({ baseURL: answersURL, sleep: async () => undefined });

test("a turn goes on from the one before", async () => {
  const { responses } = ours;
  const first = await responses.create({ input: "hi", instructions: "be brief", metadata: { a: "b" } });
  assert.deepEqual([first.status, sdk.outputText(first), first.metadata], ["completed", "Hé 😊!", { a: "b" }]);
  assert.equal(first.usage.input_tokens_details.cached_tokens, 3);
  assert.ok(first.prompt_cache_diagnostics && first.request_id);
  const second = await responses.create({ input: "more", previous_response_id: first.id });
  const items = await responses.inputItems(second.id, { order: "asc", limit: 2 });
  assert.deepEqual(items.data.map((item) => item.role), ["user", "assistant"]);
  assert.ok(items.has_more);
  await responses.create({ input: [{ role: "user", content: "hi" }, ...first.output, { role: "user", content: "x" }] });
  assert.ok((await responses.countTokens({ input: "hi" })) < (await responses.countTokens({ input: "hi there" })));
});

test("a stream ends with the whole response", async () => {
  const stream = ours.responses.stream({ input: "hi" }, { resume: true });
  let text = "";
  for await (const piece of stream.texts()) text += piece;
  const final = await stream.response();
  assert.equal(text, "Hé 😊!");
  assert.equal(sdk.outputText(final), text);
  assert.equal(final.id, stream.responseId);
  assert.equal(sdk.outputText(await ours.responses.get(final.id)), text);
  assert.ok((await ours.responses.delete(final.id)).deleted);
  await assert.rejects(ours.responses.get(final.id), sdk.NotFoundError);
});

test("a response in the background is read again and cancelled", async () => {
  const begun = await ours.responses.create({ input: "hi", background: true, ignore_eos: true, max_output_tokens: 2000 });
  assert.deepEqual([begun.status, begun.background], ["queued", true]);
  const stream = ours.responses.resume(begun.id);
  for await (const event of stream) if (event.type === "response.output_text.delta") break;
  const rest = ours.responses.resume(begun.id, stream.lastNumber);
  for await (const event of rest) {
    assert.equal(event.sequence_number, stream.lastNumber + 1);
    break;
  }
  assert.equal((await ours.responses.cancel(begun.id)).status, "cancelled");
});

function numbered(events, first = 0, rest = {}) {
  const pieces = events.map(([type, fields], index) => {
    const event = { type: `response.${type}`, sequence_number: first + index, ...fields };
    return `event: ${event.type}\nid: r:${first + index}\ndata: ${JSON.stringify(event)}\n\n`;
  });
  return { pieces, ...rest };
}

const body = { id: "resp_1", status: "in_progress", output: [] };
const created = ["created", { response: body }];
const [one, two] = ["one ", "two"].map((delta) => ["output_text.delta", { delta }]);
const done = ["completed", { response: { ...body, status: "completed" } }];

test("a lost stream goes on behind its last event", async () => {
  await script(numbered([created, one], 0, { drop: true }), { status: 503, body: {} }, numbered([two, done], 2));
  const stream = scripted.responses.stream({ input: "hi", cache_salt: "s" }, { resume: true });
  let text = "";
  for await (const piece of stream.texts()) text += piece;
  assert.equal(text, "one two");
  assert.equal((await stream.response()).status, "completed");
  const [first, ...others] = await seen();
  assert.deepEqual(first.body.stream_options, { resume: true });
  assert.deepEqual(
    others.map((request) => request.path),
    Array(2).fill("/v1/responses/resp_1?stream=true&starting_after=1&cache_salt=s"),
  );
});

test("a stream that brings nothing more is given up", async () => {
  await script(numbered([created], 0, { drop: true }), ...Array(5).fill({ pieces: [], drop: true }));
  await assert.rejects(scripted.responses.stream({ input: "hi" }, { resume: true }).response(), sdk.StreamError);
  assert.equal((await seen()).length, 4);
});

for (const drop of [true, false]) {
  test(`without resume a lost stream (drop: ${drop}) is an error`, async () => {
    await script(numbered([created, one], 0, { drop }));
    await assert.rejects(scripted.responses.stream({ input: "hi" }).response(), sdk.StreamError);
    assert.equal((await seen()).length, 1);
  });
}

test("something else than events is an error", async () => {
  await script({ pieces: ["data: <html>\n\n"] });
  await assert.rejects(scripted.responses.stream({ input: "hi" }).response(), sdk.APIResponseError);
});
