// Tells the scripted server (tests/support/answer_server.py) what to answer, and asks what it was asked.

export const answersURL = process.env.ARTESIAN_ANSWERS;
export const hello = [{ role: "user", content: "hi" }];
export const whole = {
  body: {
    id: "chatcmpl-1",
    created: 1,
    model: "m",
    choices: [{ index: 0, message: { role: "assistant", content: "Hello" }, finish_reason: "stop" }],
    usage: { prompt_tokens: 9, completion_tokens: 2, total_tokens: 11, prompt_tokens_details: { cached_tokens: 4 } },
    prompt_cache_diagnostics: { type: "cache_hit", cached_tokens: 4, sources: { disk: 4 } },
  },
};

export async function script(...answers) {
  await fetch(`${answersURL}/script`, { method: "POST", body: JSON.stringify(answers) });
}

export async function seen() {
  return (await fetch(`${answersURL}/requests`)).json();
}

export function events(chunks, { done = true, ...rest } = {}) {
  const base = { id: "chatcmpl-1", object: "chat.completion.chunk", created: 1, model: "m" };
  const pieces = chunks.map((chunk) => `data: ${JSON.stringify({ ...base, ...chunk })}\n\n`);
  return { pieces: done ? [...pieces, "data: [DONE]\n\n"] : pieces, ...rest };
}

export function delta(fields, finish = null) {
  return { choices: [{ index: 0, delta: fields, finish_reason: finish }] };
}

/** The chunks of an answer that calls tools: [id, name, arguments], the arguments cut in two. */
export function calling(...calls) {
  const chunks = calls.flatMap(([id, name, text], index) => {
    const half = Math.floor(text.length / 2);
    const begin = { index, id, type: "function", function: { name, arguments: text.slice(0, half) } };
    const rest = { index, function: { arguments: text.slice(half) } };
    return [delta({ tool_calls: [begin] }), delta({ tool_calls: [rest] })];
  });
  return [...chunks, delta({}, "tool_calls")];
}
