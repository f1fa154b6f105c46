// Runs in a browser: uses the SDK from there, and posts what it saw to where the page came from.
import { Client, NotFoundError, tool } from "/dist/index.js";

const query = new URLSearchParams(location.search);
const ours = new Client({ baseURL: query.get("ours"), apiKey: "one" });
const answers = new Client({ baseURL: query.get("answers") });
const messages = [{ role: "user", content: "hi" }];

async function look() {
  const answer = await ours.chat.create({ messages });
  let text = "";
  for await (const piece of ours.chat.stream({ messages }).texts()) text += piece;
  for await (const event of ours.chat.stream({ messages, ignore_eos: true, max_tokens: 3000 })) {
    if (event.type === "content_delta") break;
  }
  const missing = await ours.caches.get("none").catch((error) => error);
  const add = tool({ name: "add", run: ({ a, b }) => a + b });
  const done = await answers.chat.runTools({ messages, tools: [add] });
  return {
    whole: answer.choices[0].message.content,
    request_id: answer.request_id,
    text,
    missing: [missing instanceof NotFoundError, missing.code, missing.requestId],
    tools: [done.text, done.messages[2].content],
  };
}

const seen = await look().catch((error) => ({ error: String(error?.stack ?? error) }));
await fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
