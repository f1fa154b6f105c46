// The tool loop: the model calls, functions run, the model reads what they gave; until it answers in text.

import type { ChatStream } from "./chat-stream.js";
import { ToolRoundsExceeded } from "./errors.js";
import type { ToolLoopEvent } from "./events.js";
import { type AnyTool, definition, runCalls, type ToolLimits } from "./tools.js";
import type { CallOptions } from "./transport.js";
import type { ChatAnswer, ChatParams, RequestMessage } from "./types.js";

/** Reasons with which calls are whole; behind "length" the last one is cut. */
const MAY_CALL = new Set(["tool_calls", "stop", "function_call"]);

/** A request that runs tools. */
export interface ToolChatParams extends Omit<ChatParams, "tools"> {
  messages: RequestMessage[];
  tools: AnyTool[];
}

export interface ToolLoopOptions extends CallOptions {
  limits?: ToolLimits;
  /** Told of everything that happens. */
  onEvent?: (event: ToolLoopEvent) => void;
}

/** What a tool loop came to. */
export interface ToolRun {
  /** The last one. */
  answer: ChatAnswer;
  /** The last answer's text. */
  text: string;
  /** The whole conversation, the last answer included: what the next turn begins with. */
  messages: RequestMessage[];
  /** Of every round, with its usage and cache diagnostics. */
  answers: ChatAnswer[];
}

/** Run the loop to its end; `stream` asks the model. */
export async function runTools(
  stream: (params: ChatParams, options: CallOptions) => ChatStream,
  params: ToolChatParams,
  options: ToolLoopOptions,
): Promise<ToolRun> {
  const { limits: given, onEvent, idempotencyKey, ...callOptions } = options;
  const limits = { maxRounds: 10, callTimeoutMs: 60_000, concurrency: 8, ...given };
  if (!(limits.maxRounds >= 1 && limits.concurrency >= 1 && limits.callTimeoutMs > 0)) {
    throw new RangeError("maxRounds and concurrency are 1 or more, callTimeoutMs is above 0");
  }
  const tools = new Map(params.tools.map((entry) => [entry.name, entry]));
  if (tools.size === 0 || tools.size < params.tools.length) {
    throw new TypeError("runTools needs tools, each with a name of its own");
  }
  if ((params.n ?? 1) !== 1) throw new TypeError("runTools follows one answer: n must be 1");
  const signal = options.signal ?? new AbortController().signal;
  const tell = onEvent ?? (() => undefined);
  const messages = [...params.messages];
  const answers: ChatAnswer[] = [];
  const request: ChatParams = { ...params, tools: params.tools.map(definition), messages };
  for (let round = 0; ; round++) {
    signal.throwIfAborted();
    // A call that is demanded is demanded once: in each round it would never end.
    if (round > 0 && request.tool_choice !== undefined && request.tool_choice !== "none") {
      request.tool_choice = "auto";
    }
    const key = idempotencyKey === undefined ? undefined : `${idempotencyKey}-${round}`;
    const events = stream(request, { ...callOptions, idempotencyKey: key });
    for await (const event of events) tell(event);
    const answer = await events.answer();
    const choice = answer.choices[0];
    if (choice === undefined) throw new TypeError("the answer has no choice");
    answers.push(answer);
    const calls = MAY_CALL.has(choice.finish_reason ?? "") ? (choice.message.tool_calls ?? []) : [];
    if (calls.length > 0 && round + 1 >= limits.maxRounds) {
      throw new ToolRoundsExceeded(`The model still calls tools after ${limits.maxRounds} rounds.`, messages);
    }
    messages.push(choice.message);
    if (calls.length === 0) return { answer, text: choice.message.content ?? "", messages, answers };
    const results = await runCalls(calls, tools, limits, signal, tell);
    calls.forEach((call, index) =>
      messages.push({ role: "tool", tool_call_id: call.id, content: results[index] ?? "" }),
    );
  }
}
