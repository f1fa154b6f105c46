// A chat stream: bytes in, typed events out, and the whole answer at its end.

import { APIConnectionError, APIResponseError, type ErrorObject, requestIdOf, StreamError } from "./errors.js";
import type { ChatEvent } from "./events.js";
import { EventParser, type ServerEvent } from "./sse.js";
import type { OpenAnswer } from "./transport.js";
import type { ChatAnswer, ChatChoice, ChatChunk, ToolCall, ToolCallDelta } from "./types.js";

/** Builds events and the answer from a stream's bytes. Does no input or output. */
export class ChatReader {
  isDone = false;
  /** Of the last event, where the stream can be taken up again behind it. */
  lastId = "";
  #parser = new EventParser();
  readonly #choices = new Map<number, Choice>();
  readonly #answer: ChatAnswer = { id: "", model: "", created: 0, choices: [] };
  readonly #requestId: string | undefined;

  constructor(requestId?: string) {
    this.#requestId = requestId;
    if (requestId !== undefined) this.#answer.request_id = requestId;
  }

  /** Return the events that these bytes complete. */
  feed(bytes: Uint8Array): ChatEvent[] {
    return this.#parser.feed(bytes).flatMap((sent) => this.#take(sent));
  }

  /** Begin with the bytes of another connection, which goes on behind the last event. */
  connect(): void {
    this.#parser = new EventParser();
  }

  /** Return what has come so far; the whole answer once `isDone`. */
  answer(): ChatAnswer {
    const choices = [...this.#choices.values()].sort((one, other) => one.index - other.index);
    return { ...this.#answer, choices: choices.map((choice) => choice.result()) };
  }

  #take(sent: ServerEvent): ChatEvent[] {
    if (this.isDone) return [];
    if (sent.id) this.lastId = sent.id;
    if (sent.data === "[DONE]") {
      this.isDone = true;
      return [];
    }
    const chunk = this.#parse(sent.data);
    const { id, model, created, system_fingerprint, warnings, prompt_token_ids } = chunk;
    Object.assign(this.#answer, { id, model, created });
    if (system_fingerprint !== undefined) this.#answer.system_fingerprint = system_fingerprint;
    if (warnings !== undefined) this.#answer.warnings = warnings;
    if (prompt_token_ids !== undefined) this.#answer.prompt_token_ids = prompt_token_ids;
    const events: ChatEvent[] = [];
    for (const part of chunk.choices) {
      let choice = this.#choices.get(part.index);
      if (choice === undefined) this.#choices.set(part.index, (choice = new Choice(part.index)));
      choice.take(part, events);
    }
    if (chunk.usage) {
      this.#answer.usage = chunk.usage;
      const { prompt_cache_diagnostics } = chunk;
      if (prompt_cache_diagnostics !== undefined) {
        this.#answer.prompt_cache_diagnostics = prompt_cache_diagnostics;
      }
      if (chunk.choices.length === 0) events.push({ type: "usage", usage: chunk.usage, prompt_cache_diagnostics });
    }
    return events;
  }

  #parse(data: string): ChatChunk {
    let chunk: (ChatChunk & { error?: ErrorObject }) | null;
    try {
      chunk = JSON.parse(data);
    } catch (cause) {
      throw new APIResponseError("The stream has an event that is no chunk.", this.#requestId, { cause });
    }
    if (chunk?.error) throw new StreamError(chunk.error.message, this.#requestId, chunk.error);
    if (!Array.isArray(chunk?.choices)) {
      throw new APIResponseError("The stream has an event that is no chunk.", this.#requestId);
    }
    return chunk;
  }
}

/** One choice on its way. */
class Choice {
  readonly index: number;
  readonly #content: string[] = [];
  readonly #reasoning: string[] = [];
  readonly #refusal: string[] = [];
  readonly #calls = new Map<number, { call: ToolCall; pieces: string[] }>();
  readonly #result: ChatChoice;
  #openCall: number | undefined;

  constructor(index: number) {
    this.index = index;
    this.#result = { index, message: { role: "assistant", content: null }, finish_reason: null };
  }

  result(): ChatChoice {
    const { message } = this.#result;
    const text = this.#content.join("");
    message.content = this.#content.length > 0 || this.#calls.size === 0 ? text : null;
    if (this.#reasoning.length > 0) message.reasoning_content = this.#reasoning.join("");
    if (this.#refusal.length > 0) message.refusal = this.#refusal.join("");
    if (this.#calls.size > 0) {
      message.tool_calls = [...this.#calls.keys()].sort((one, other) => one - other).map((i) => this.#call(i));
    }
    return this.#result;
  }

  take(part: ChatChunk["choices"][number], events: ChatEvent[]): void {
    const { delta } = part;
    const choice = this.index;
    if (delta.role) this.#result.message.role = delta.role;
    if (delta.reasoning_content) {
      this.#reasoning.push(delta.reasoning_content);
      events.push({ type: "reasoning_delta", choice, text: delta.reasoning_content });
    }
    if (delta.content) {
      this.#content.push(delta.content);
      events.push({ type: "content_delta", choice, text: delta.content });
    }
    if (delta.refusal) this.#refusal.push(delta.refusal);
    for (const call of delta.tool_calls ?? []) this.#takeCall(call, events);
    if (part.logprobs?.content) {
      this.#result.logprobs ??= { content: [] };
      this.#result.logprobs.content?.push(...part.logprobs.content);
    }
    if (part.token_ids) (this.#result.token_ids ??= []).push(...part.token_ids);
    if (part.finish_reason !== null && part.finish_reason !== undefined) {
      this.#endCall(events);
      this.#result.finish_reason = part.finish_reason;
      if (part.stop_reason !== undefined) this.#result.stop_reason = part.stop_reason;
      events.push({ type: "choice_done", choice, finish_reason: part.finish_reason });
    }
  }

  #takeCall(delta: ToolCallDelta, events: ChatEvent[]): void {
    const { index } = delta;
    const text = delta.function?.arguments;
    let entry = this.#calls.get(index);
    if (entry === undefined) {
      this.#endCall(events);
      const { id } = delta;
      const name = delta.function?.name;
      if (!id || !name) throw new APIResponseError(`The stream's tool call ${index} begins without id or name.`);
      entry = { call: { id, type: "function", function: { name, arguments: "" } }, pieces: [] };
      this.#calls.set(index, entry);
      this.#openCall = index;
      events.push({ type: "tool_call_begun", choice: this.index, index, id, name });
    }
    if (text) {
      entry.pieces.push(text);
      events.push({ type: "tool_arguments_delta", choice: this.index, index, text });
    }
  }

  #endCall(events: ChatEvent[]): void {
    if (this.#openCall === undefined) return;
    const index = this.#openCall;
    this.#openCall = undefined;
    events.push({ type: "tool_call_done", choice: this.index, index, call: this.#call(index) });
  }

  #call(index: number): ToolCall {
    const entry = this.#calls.get(index);
    if (entry === undefined) throw new Error(`there is no call ${index}`);
    entry.call.function.arguments = entry.pieces.join("");
    return entry.call;
  }
}

/**
 * A stream to iterate over, once. Leaving the loop early ends the request in the server, unless it can be taken up
 * again: then it goes on for the server's grace time.
 */
export class ChatStream implements AsyncIterable<ChatEvent> {
  /** The server's id of this request, once its head has come. */
  requestId: string | undefined;
  readonly #send: () => Promise<OpenAnswer>;
  readonly #reopen: ((eventId: string) => Promise<OpenAnswer>) | undefined;
  readonly #maxReconnects: number;
  #reader = new ChatReader();
  #events: AsyncGenerator<ChatEvent, void> | undefined;

  constructor(
    send: () => Promise<OpenAnswer>,
    reopen?: (eventId: string) => Promise<OpenAnswer>,
    maxReconnects = 0,
  ) {
    this.#send = send;
    this.#reopen = reopen;
    this.#maxReconnects = maxReconnects;
  }

  [Symbol.asyncIterator](): AsyncGenerator<ChatEvent, void> {
    return (this.#events ??= this.#read());
  }

  /** What has come so far. */
  get partial(): ChatAnswer {
    return this.#reader.answer();
  }

  /** The pieces of the first choice's text. */
  async *texts(): AsyncGenerator<string, void> {
    for await (const event of this) {
      if (event.type === "content_delta" && event.choice === 0) yield event.text;
    }
  }

  /** Read the rest, and return the whole answer. */
  async answer(): Promise<ChatAnswer> {
    const events = this[Symbol.asyncIterator]();
    for (let next = await events.next(); !next.done; next = await events.next());
    return this.#reader.answer();
  }

  async *#read(): AsyncGenerator<ChatEvent, void> {
    let answer = await this.#send();
    this.requestId = requestIdOf(answer.headers);
    const reader = (this.#reader = new ChatReader(this.requestId));
    for (let failures = 0; ; ) {
      const before = reader.lastId;
      let cause: APIConnectionError | undefined;
      try {
        for (let piece = await answer.read(); piece !== undefined; piece = await answer.read()) {
          yield* reader.feed(piece);
        }
      } catch (error) {
        if (!(error instanceof APIConnectionError)) throw error;
        cause = error;
      } finally {
        answer.close();
      }
      if (reader.isDone) return;
      failures = reader.lastId === before ? failures + 1 : 0;
      if (this.#reopen === undefined || !reader.lastId || failures > this.#maxReconnects) {
        const why = cause === undefined ? "" : ` ${cause.message}`;
        throw new StreamError(`The stream broke off before its end.${why}`, this.requestId, undefined, { cause });
      }
      answer = await this.#reopen(reader.lastId);
      reader.connect();
    }
  }
}
