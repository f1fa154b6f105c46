// The loop that runs functions for the model.
import assert from "node:assert/strict";
import test from "node:test";

import { Client, tool, ToolRoundsExceeded } from "../../../clients/typescript/dist/index.js";
import { answersURL, calling, delta, events, hello, script, seen } from "./answers.mjs";

const client = new Client({ baseURL: answersURL });
const final = events([delta({ content: "Sunny." }, "stop")]);
const numbers = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } }, required: ["a", "b"] };
const add = tool({ name: "add", description: "Add.", parameters: numbers, strict: true, run: ({ a, b }) => a + b });
const double = tool({ name: "double", run: async ({ a }) => ({ twice: 2 * a }) });

/** What the model was told in the last request. */
async function results() {
  const { messages } = (await seen()).at(-1).body;
  return messages.filter((message) => message.role === "tool").map((message) => message.content);
}

test("calls run and the answer ends the loop", async () => {
  await script(events(calling(["c1", "add", '{"a":2,"b":3}'], ["c2", "double", '{"a":1.5}'])), final);
  const told = [];
  const done = await client.chat.runTools(
    { messages: hello, tools: [add, double], temperature: 0, tool_choice: "required" },
    { onEvent: (event) => told.push(event.type), idempotencyKey: "k" },
  );
  assert.deepEqual([done.text, done.answers.length], ["Sunny.", 2]);
  const [first, second] = (await seen()).map((request) => request.body);
  assert.deepEqual(first.tools, [
    { type: "function", function: { name: "add", parameters: numbers, description: "Add.", strict: true } },
    { type: "function", function: { name: "double", parameters: { type: "object", properties: {}, additionalProperties: false } } },
  ]);
  assert.deepEqual([first.tool_choice, second.tool_choice], ["required", "auto"]);
  assert.deepEqual(second.messages, done.messages.slice(0, -1));
  assert.deepEqual(done.messages.map((message) => message.role), ["user", "assistant", "tool", "tool", "assistant"]);
  assert.deepEqual(await results(), ["5", '{"twice":3}']);
  assert.deepEqual((await seen()).map((request) => request.headers["idempotency-key"]), ["k-0", "k-1"]);
  assert.equal(told.filter((type) => type === "tool_finished").length, 2);
  assert.equal(hello.length, 1);
});

test("calls of one round run at once within the limit", async () => {
  let running = 0;
  let most = 0;
  const waiting = [];
  const meet = tool({
    name: "meet",
    async run({ n }) {
      most = Math.max(most, ++running);
      await new Promise((resolve) => {
        waiting.push(resolve);
        if (waiting.length === 2) waiting.splice(0).forEach((go) => go());
      });
      running--;
      return n;
    },
  });
  await script(events(calling(...[0, 1, 2, 3].map((n) => [`c${n}`, "meet", `{"n":${n}}`]))), final);
  await client.chat.runTools({ messages: hello, tools: [meet] }, { limits: { concurrency: 2 } });
  assert.deepEqual(await results(), ["0", "1", "2", "3"]);
  assert.equal(most, 2);
});

for (const [name, entry, text, said] of [
  ["throws", { run: () => { throw new Error("no such city"); } }, "{}", '{"error":"no such city"}'],
  ["throws no error", { run: () => { throw "so"; } }, "{}", '{"error":"so"}'],
  ["gives nothing", { run: () => undefined }, "{}", "null"],
  ["gives a number that JSON cannot hold", { run: () => 1n }, "{}", /BigInt/],
  ["cannot read its arguments", { run: () => 1 }, '{"a":1', '{"error":"The arguments of f are not JSON."}'],
  ["wants an object", { run: () => 1 }, "[1]", '{"error":"The arguments of f are no object."}'],
  ["has a parser that refuses", { run: () => 1, parse: () => { throw new Error("a is missing"); } }, "{}", '{"error":"a is missing"}'],
  ["has a parser that converts", { run: (at) => at.getUTCFullYear(), parse: ({ at }) => new Date(at) }, '{"at":"2026-01-01"}', "2026"],
  ["takes an empty text for no arguments", { run: (args) => args }, "", "{}"],
]) {
  test(`a tool that ${name}`, async () => {
    await script(events(calling(["c1", "f", text])), final);
    assert.equal((await client.chat.runTools({ messages: hello, tools: [{ name: "f", ...entry }] })).text, "Sunny.");
    const [content] = await results();
    if (said instanceof RegExp) assert.match(content, said);
    else assert.equal(content, said);
  });
}

test("an unknown tool is answered with the known ones", async () => {
  await script(events(calling(["c1", "subtract", "{}"])), final);
  await client.chat.runTools({ messages: hello, tools: [add, double] });
  assert.deepEqual(await results(), [`{"error":"There is no tool 'subtract'; there are: add, double."}`]);
});

test("a call that takes too long is told so by its signal, and given up", async () => {
  let reason;
  const hangs = tool({
    name: "hangs",
    timeoutMs: 50,
    run: (_, { signal }) => {
      signal.addEventListener("abort", () => (reason = signal.reason.message));
      return new Promise(() => undefined);
    },
  });
  await script(events(calling(["c1", "hangs", "{}"])), final);
  await client.chat.runTools({ messages: hello, tools: [hangs] });
  assert.deepEqual(await results(), ['{"error":"hangs took longer than 50 ms."}']);
  assert.equal(reason, "hangs took longer than 50 ms.");
});

test("rounds are limited and the conversation is kept", async () => {
  await script(...Array(5).fill(events(calling(["c1", "add", '{"a":1,"b":1}']))));
  await assert.rejects(
    client.chat.runTools({ messages: hello, tools: [add] }, { limits: { maxRounds: 3 } }),
    (error) => error instanceof ToolRoundsExceeded && error.messages.length === 5,
  );
  assert.equal((await seen()).length, 3);
});

test("a call that was cut is not run", async () => {
  await script(events([...calling(["c1", "add", '{"a":1,']).slice(0, -1), delta({}, "length")]));
  const done = await client.chat.runTools({ messages: hello, tools: [add] });
  assert.equal(done.answer.choices[0].finish_reason, "length");
  assert.equal((await seen()).length, 1);
});

test("aborting ends the loop while a tool runs, and tells the tool", async () => {
  const controller = new AbortController();
  let told = false;
  const hangs = tool({
    name: "hangs",
    run: (_, { signal }) => {
      signal.addEventListener("abort", () => (told = true));
      setTimeout(() => controller.abort(new Error("enough")), 10);
      return new Promise(() => undefined);
    },
  });
  await script(events(calling(["c1", "hangs", "{}"])), final);
  const { signal } = controller;
  await assert.rejects(client.chat.runTools({ messages: hello, tools: [hangs] }, { signal }), /enough/);
  assert.ok(told);
  assert.equal((await seen()).length, 1);
});

test("aborting ends the loop while the model is silent", async () => {
  await script(events([delta({ content: "late" }, "stop")], { pause_s: 30 }));
  const signal = AbortSignal.timeout(100);
  await assert.rejects(client.chat.runTools({ messages: hello, tools: [add] }, { signal }), { name: "TimeoutError" });
});

for (const tools of [[], [add, add]]) {
  test(`${tools.length} tools need names of their own`, async () => {
    await assert.rejects(client.chat.runTools({ messages: hello, tools }), /each with a name/);
  });
}
