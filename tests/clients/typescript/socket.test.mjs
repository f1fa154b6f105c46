// Responses over a WebSocket: several turns on one connection.
import assert from "node:assert/strict";
import test from "node:test";

import * as sdk from "../../../clients/typescript/dist/index.js";

const ours = new sdk.Client({ baseURL: process.env.ARTESIAN_URL, apiKey: "one" });

test("turns follow each other on one connection", async () => {
  const socket = await ours.responses.connect();
  const first = await socket.respond({ input: "hi" });
  assert.deepEqual([first.status, sdk.outputText(first)], ["completed", "Hé 😊!"]);
  let text = "";
  for await (const event of socket.create({ input: "more", previous_response_id: first.id })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, "Hé 😊!");
  socket.close();
});

test("a refused turn is a typed error and leaves the connection open", async () => {
  const socket = await ours.responses.connect();
  await assert.rejects(socket.respond({ input: "hi", temperature: 9 }), (error) => {
    return error instanceof sdk.BadRequestError && error.param === "temperature";
  });
  assert.equal((await socket.respond({ input: "hi" })).status, "completed");
  socket.close();
});

test("a running turn is steered, and the next one read", async () => {
  const socket = await ours.responses.connect();
  let id;
  let last;
  let deltas = 0;
  for await (const event of socket.create({ input: "hi", ignore_eos: true, max_output_tokens: 2000 })) {
    last = event.response;
    id ??= event.response?.id;
    if (event.type === "response.output_text.delta" && ++deltas === 1) socket.steer(id, "shorter");
  }
  assert.deepEqual([last.status, last.incomplete_details.reason], ["incomplete", "steered"]);
  const turn = socket.steered();
  const { value } = await turn.next();
  assert.equal(value.type, "response.created");
  assert.equal(value.response.previous_response_id, id);
  socket.close();
});

test("leaving a turn closes the connection", async () => {
  const socket = await ours.responses.connect();
  for await (const event of socket.create({ input: "hi" })) if (event.type === "response.created") break;
  await assert.rejects(socket.respond({ input: "hi" }), sdk.StreamError);
});

test("two turns at once are refused here", async () => {
  const socket = await ours.responses.connect();
  const turn = socket.create({ input: "hi" });
  await turn.next();
  await assert.rejects(socket.respond({ input: "hi" }), /a turn runs/);
  for await (const _ of turn);
  socket.close();
});

test("a server that does not take the connection is an error", async () => {
  const wrong = new sdk.Client({ baseURL: process.env.ARTESIAN_URL, apiKey: "two" });
  await assert.rejects(wrong.responses.connect(), sdk.APIConnectionError);
});
