// Speaks to a server through OpenAI's JavaScript SDK and prints what it saw as one JSON object.
// Arguments: the server's URL, and what to try.
import OpenAI from "openai";

const [url, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "one", maxRetries: 0 });
const request = { model: "scripted", messages: [{ role: "user", content: "hi" }] };

const scenarios = {
  async whole() {
    const answer = await client.chat.completions.create(request);
    return { text: answer.choices[0].message.content, finish: answer.choices[0].finish_reason, usage: answer.usage };
  },
  async stream() {
    const stream = await client.chat.completions.create({
      ...request,
      stream: true,
      stream_options: { include_usage: true },
    });
    const seen = { text: "", finish: null, usage: null };
    for await (const chunk of stream) {
      seen.text += chunk.choices[0]?.delta.content ?? "";
      seen.finish = chunk.choices[0]?.finish_reason ?? seen.finish;
      seen.usage = chunk.usage ?? seen.usage;
    }
    return seen;
  },
  async cancel() {
    const stream = await client.chat.completions.create({ ...request, stream: true });
    let pieces = 0;
    for await (const chunk of stream) if (chunk.choices[0]?.delta.content && ++pieces === 2) break;
    return { pieces };
  },
  async refused() {
    try {
      await client.chat.completions.create({ ...request, temperature: 9 });
    } catch (error) {
      return { kind: error.constructor.name, status: error.status, param: error.param, code: error.code };
    }
  },
  async completion() {
    const answer = await client.completions.create({ model: "scripted", prompt: "hi" });
    return { text: answer.choices[0].text };
  },
  async tools(stream) {
    const told = [];
    const add = {
      type: "function",
      function: {
        name: "add",
        description: "Add.",
        parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } }, required: ["a", "b"] },
        parse: JSON.parse,
        function: ({ a, b }) => `sum is ${a + b}`,
      },
    };
    const runner = client.chat.completions.runTools({ ...request, tools: [add], stream });
    runner.on("functionToolCall", (call) => told.push(call.name));
    return { text: await runner.finalContent(), told, roles: runner.messages.map((message) => message.role) };
  },
  toolsInParts: () => scenarios.tools(true),
  async models() {
    return { ids: (await client.models.list()).data.map((model) => model.id) };
  },
};
console.log(JSON.stringify(await scenarios[scenario]()));
