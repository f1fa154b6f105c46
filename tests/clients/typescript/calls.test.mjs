// One call: what is sent, retried, thrown and returned.
import assert from "node:assert/strict";
import test from "node:test";

import * as sdk from "../../../clients/typescript/dist/index.js";
import { DEFAULT_RETRY, waitMs } from "../../../clients/typescript/dist/retry.js";
import { answersURL, hello, script, seen, whole } from "./answers.mjs";

const full = (headers = {}) => ({ status: 503, headers, body: { error: { message: "full", code: "server_overloaded" } } });

function client(options = {}) {
  return new sdk.Client({ baseURL: answersURL, sleep: async () => undefined, ...options });
}

test("an answer has its request id, usage and diagnostics", async () => {
  await script(whole);
  const answer = await client({ apiKey: "secret" }).chat.create(
    { messages: hello, temperature: 0, top_k: 3 },
    { idempotencyKey: "once" },
  );
  assert.equal(answer.choices[0].message.content, "Hello");
  assert.equal(answer.request_id, "req_1");
  assert.deepEqual(answer.prompt_cache_diagnostics.sources, { disk: 4 });
  const [request] = await seen();
  assert.equal(request.headers.authorization, "Bearer secret");
  assert.equal(request.headers["idempotency-key"], "once");
  assert.deepEqual(request.body, { messages: hello, temperature: 0, top_k: 3 });
});

for (const suffix of ["", "/", "/v1", "/v1/"]) {
  test(`the address may end with '${suffix}'`, async () => {
    await script(whole);
    await client({ baseURL: answersURL + suffix }).chat.create({ messages: hello });
    assert.equal((await seen())[0].path, "/v1/chat/completions");
  });
}

for (const [headers, expected] of [
  [{ "retry-after-ms": "250", "retry-after": "9" }, 250],
  [{ "retry-after": "2" }, 2000],
  [{ "retry-after": "Thu, 01 Jan 1970 00:01:40 GMT" }, 10_000],
  [{ "retry-after": "soon" }, 500],
  [{}, 500],
]) {
  test(`a refused request waits as it is told by ${JSON.stringify(headers)}`, async () => {
    await script(full(headers), whole);
    const waits = [];
    const sleep = async (ms) => void waits.push(ms);
    const answer = await client({ sleep, retry: { random: () => 0, now: () => 90_000 } }).chat.create({ messages: hello });
    assert.equal(answer.choices[0].message.content, "Hello");
    assert.deepEqual(waits, [expected]);
  });
}

test("waits grow and vary, stay below the cap, and a server's wait is never cut short", () => {
  const policy = { ...DEFAULT_RETRY, maxRetries: 9, random: () => 1 };
  const none = new Headers();
  const waits = Array.from({ length: 10 }, (_, attempt) => waitMs(policy, attempt, 500, none));
  assert.deepEqual(waits.slice(0, 3), [375, 750, 1500]);
  assert.deepEqual(waits.slice(8), [6000, undefined]);
  const asked = (seconds) => waitMs(policy, 0, 429, new Headers({ "retry-after": seconds }));
  assert.deepEqual(["4", "61", "-5", "nan"].map(asked), [5000, undefined, 0, 375]);
});

for (const [status, told, attempts] of [
  [400, null, 1],
  [409, null, 1],
  [400, "true", 3],
  [503, "false", 1],
  [408, null, 3],
  [500, null, 3],
]) {
  test(`${status} with x-should-retry ${told} takes ${attempts} attempts`, async () => {
    const headers = told === null ? {} : { "x-should-retry": told };
    await script(...Array(5).fill({ status, headers, body: {} }));
    await assert.rejects(client().chat.create({ messages: hello }), sdk.APIStatusError);
    assert.equal((await seen()).length, attempts);
  });
}

for (const [status, kind] of [
  [400, "BadRequestError"],
  [401, "AuthenticationError"],
  [404, "NotFoundError"],
  [409, "ConflictError"],
  [422, "UnprocessableEntityError"],
  [429, "RateLimitError"],
  [500, "InternalServerError"],
  [503, "ServiceUnavailableError"],
  [418, "APIStatusError"],
]) {
  test(`${status} is a ${kind} that says what the server said`, async () => {
    await script({ status, body: { error: { message: "no", type: "t", param: "messages[0]", code: "c" } } });
    await assert.rejects(client({ maxRetries: 0 }).chat.create({ messages: hello }), (error) => {
      assert.equal(error.constructor, sdk[kind]);
      assert.equal(error.name, kind);
      const { status: code, param, requestId } = error;
      assert.deepEqual([code, error.code, param, error.type, requestId], [status, "c", "messages[0]", "t", "req_1"]);
      return true;
    });
  });
}

test("a proxy's page is an error with its beginning", async () => {
  await script({ status: 502, pieces: [`<html>Bad Gateway${"x".repeat(1000)}`] });
  await assert.rejects(client({ maxRetries: 0 }).models(), (error) => {
    return error instanceof sdk.InternalServerError && error.message.includes("Bad Gateway") && error.message.length < 300;
  });
});

for (const answer of [{ body: [1] }, { pieces: ["<html>"] }]) {
  test(`a success that is no answer is an error of its own: ${JSON.stringify(answer)}`, async () => {
    await script(answer);
    await assert.rejects(client().models(), sdk.APIResponseError);
  });
}

test("a lost connection is tried again, and in the end an error", async () => {
  await script({ drop: true }, whole, { drop: true });
  assert.equal((await client().chat.create({ messages: hello })).choices.length, 1);
  await assert.rejects(client({ maxRetries: 0 }).chat.create({ messages: hello }), sdk.APIConnectionError);
});

test("a slow answer is a timeout", async () => {
  await script({ pause_s: 5 });
  await assert.rejects(client({ maxRetries: 0, timeoutMs: 50 }).models(), sdk.APITimeoutError);
});

test("aborting ends a request, and a wait between attempts, with the caller's reason", async () => {
  await script({ pause_s: 5 });
  const reason = new Error("enough");
  const controller = new AbortController();
  setTimeout(() => controller.abort(reason), 50);
  await assert.rejects(client().models({ signal: controller.signal }), reason);

  await script(full({ "retry-after": "50" }));
  const patient = new sdk.Client({ baseURL: answersURL });
  const other = new AbortController();
  setTimeout(() => other.abort(reason), 100);
  await assert.rejects(patient.models({ signal: other.signal }), reason);
  assert.equal((await seen()).length, 1);
});
