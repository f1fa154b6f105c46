// Uses a real server through OpenAI's JavaScript SDK and prints what it saw as one JSON object.
// Arguments: the server's URL, the model's name, and what to try.
import OpenAI from "openai";

const [url, model, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const request = { model, messages: [{ role: "user", content: "Name three rivers." }], temperature: 0, max_tokens: 24 };

async function failure(fields) {
  try {
    await client.chat.completions.create({ ...request, ...fields });
    return null;
  } catch (error) {
    const { status, code, param, requestID } = error;
    return { kind: error.constructor.name, status, code, param, hasRequestId: requestID.startsWith("req_") };
  }
}

const scenarios = {
  async stream() {
    const whole = await client.chat.completions.create(request);
    const stream = await client.chat.completions.create({ ...request, stream: true });
    let streamed = "";
    for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
    return { whole: whole.choices[0].message.content, streamed };
  },
  async choices() {
    const answer = await client.chat.completions.create({ ...request, temperature: 1, n: 2, logprobs: true, seed: 3 });
    return answer.choices.map((choice) => ({ text: choice.message.content, logprobs: choice.logprobs.content.length }));
  },
  async abort() {
    const controller = new AbortController();
    const stream = await client.chat.completions.create(
      { ...request, max_tokens: 400, stream: true, ignore_eos: true },
      { signal: controller.signal },
    );
    let pieces = 0;
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content && ++pieces === 3) controller.abort();
    return { pieces };
  },
  async abortWhole() {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 300);
    try {
      await client.chat.completions.create(
        { ...request, max_tokens: 400, ignore_eos: true },
        { signal: controller.signal },
      );
    } catch (error) {
      return { kind: error.constructor.name };
    }
  },
  async errors() {
    return {
      value: await failure({ temperature: 9 }),
      model: await failure({ model: "gpt-9", stream: true }),
    };
  },
};
console.log(JSON.stringify(await scenarios[scenario]()));
