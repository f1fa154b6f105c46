// The prompt cache by name, on an engine with a real disk tier.
import assert from "node:assert/strict";
import test from "node:test";

import { Client, NotFoundError } from "../../../clients/typescript/dist/index.js";

const client = new Client({ baseURL: process.env.ARTESIAN_DISK_URL });
const prompt = `abcdefghijkl${"1".repeat(8)}`; // one token a letter, five blocks of four
const cacheSalt = "s";

test("a prompt is kept, pinned, listed and deleted", async () => {
  const { caches } = client;
  const made = await caches.create({ name: "a.b", prompt, ttl: "7d", prompt_cache_key: "k", cache_salt: cacheSalt });
  assert.deepEqual([made.tokens, made.cached_tokens, made.pinned], [20, 20, false]);
  assert.equal((await caches.pin("a.b", { cacheSalt })).pinned, true);
  assert.equal((await caches.unpin("a.b", { cacheSalt })).pinned, false);
  assert.equal((await caches.prewarm("a.b", { cacheSalt })).usage.prompt_tokens_details.cached_tokens, 19);
  assert.deepEqual((await caches.list({ cacheSalt })).data.map((cache) => cache.name), ["a.b"]);
  assert.deepEqual((await caches.list()).data, []); // another tenant
  assert.equal((await caches.delete("a.b", { cacheSalt })).deleted_tokens, 20);
  await assert.rejects(caches.get("a.b", { cacheSalt }), (error) => {
    return error instanceof NotFoundError && error.code === "cache_not_found";
  });
});

test("a prompt is explained, and deleted by its key", async () => {
  assert.equal((await client.caches.explain({ prompt })).prompt.cached_tokens, 0);
  await client.caches.create({ name: "one", prompt, prompt_cache_key: "k" });
  const { prompt: found } = await client.caches.explain({ prompt: `${prompt.slice(0, 12)}22222222` });
  assert.deepEqual([found.cached_tokens, found.ends_with], [12, "never_seen"]);
  assert.equal((await client.caches.deleteByKey("k")).deleted_prompts, 1);
});

test("a chat's prompt is computed ahead", async () => {
  const messages = [{ role: "user", content: prompt.repeat(3) }];
  const warm = await client.chat.prewarm({ messages, prompt_cache_options: { ttl: "1h" } });
  assert.equal(warm.usage.completion_tokens, 0);
  const ahead = await client.chat.estimate({ messages });
  const answer = await client.chat.create({ messages, max_tokens: 1 });
  assert.equal(answer.usage.prompt_tokens_details.cached_tokens, ahead.cached_tokens);
  assert.ok(ahead.cached_tokens >= 60 && ahead.time_to_first_token_s > 0);
  assert.equal(answer.prompt_cache_diagnostics.type, "cache_hit");
});
