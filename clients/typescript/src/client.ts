// The client: chat, responses, completions, models and the prompt cache of one server.

import { Caches } from "./caches.js";
import { ChatStream } from "./chat-stream.js";
import { query } from "./query.js";
import { Responses, type StreamOptions } from "./responses.js";
import { runTools, type ToolChatParams, type ToolLoopOptions, type ToolRun } from "./tool-loop.js";
import { type CallOptions, type ClientOptions, Transport } from "./transport.js";
import type { ChatAnswer, ChatEstimate, ChatParams, CompletionAnswer, CompletionParams, ModelList } from "./types.js";

const CHAT_PATH = "/v1/chat/completions";

/** `client.chat`. */
export class Chat {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Return a whole answer. */
  create(params: ChatParams, options?: CallOptions): Promise<ChatAnswer> {
    return this.#transport.send("POST", CHAT_PATH, params, options);
  }

  /**
   * Return a stream of typed events; the request is sent when it is first read.
   *
   * With `resume` a lost connection is taken up again behind the last event, without a gap.
   */
  stream(params: ChatParams, options: StreamOptions = {}): ChatStream {
    const { resume, ...call } = options;
    const stream_options = { include_usage: true, ...(resume ? { resume } : {}) };
    const send = () => this.#transport.open("POST", CHAT_PATH, { ...params, stream: true, stream_options }, call);
    if (!resume) return new ChatStream(send);
    const { idempotencyKey: _, ...again } = call;
    const reopen = (eventId: string) => {
      const colon = eventId.lastIndexOf(":");
      const fields = { starting_after: eventId.slice(colon + 1), cache_salt: params.cache_salt };
      const path = `/v1/streams/${encodeURIComponent(eventId.slice(0, colon))}${query(fields)}`;
      return this.#transport.open("GET", path, undefined, again);
    };
    return new ChatStream(send, reopen, this.#transport.maxRetries(call));
  }

  /** Compute and keep the prompt, answer nothing: a later request that begins alike starts at once. */
  prewarm(params: ChatParams, options?: CallOptions): Promise<ChatAnswer> {
    const prompt_cache_options = { ...params.prompt_cache_options, prewarm: true };
    return this.#transport.send("POST", CHAT_PATH, { ...params, prompt_cache_options }, options);
  }

  /** Return what such a request would take now: tokens, cached ones, seconds to the first token. */
  estimate(params: ChatParams, options?: CallOptions): Promise<ChatEstimate> {
    return this.#transport.send("POST", `${CHAT_PATH}/estimate`, params, options);
  }

  /**
   * Let the model call functions until it answers.
   *
   * Calls of one round run at once. What a function throws goes to the model as text. A `tool_choice` that
   * demands a call holds for the first round. An answer that was cut ("length") ends the loop. Aborting the
   * signal ends the request, or the functions that run, and throws its reason.
   */
  runTools(params: ToolChatParams, options: ToolLoopOptions = {}): Promise<ToolRun> {
    return runTools((request, callOptions) => this.stream(request, callOptions), params, options);
  }
}

/** A client of one server. It holds no connection of its own: there is nothing to close. */
export class Client {
  readonly chat: Chat;
  readonly responses: Responses;
  readonly caches: Caches;
  readonly #transport: Transport;

  constructor(options: ClientOptions = {}) {
    this.#transport = new Transport(options);
    this.chat = new Chat(this.#transport);
    this.responses = new Responses(this.#transport);
    this.caches = new Caches(this.#transport);
  }

  /** Return a text that continues the prompt (`/v1/completions`). */
  complete(params: CompletionParams, options?: CallOptions): Promise<CompletionAnswer> {
    return this.#transport.send("POST", "/v1/completions", params, options);
  }

  /** Return what is served. */
  models(options?: CallOptions): Promise<ModelList> {
    return this.#transport.send("GET", "/v1/models", undefined, options);
  }
}
