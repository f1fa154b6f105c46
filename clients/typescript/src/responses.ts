// Responses: turns that the server remembers, streamed, in the background, taken up again.

import { query } from "./query.js";
import { ResponseSocket, type WebSocketClass } from "./response-socket.js";
import { type Reopen, ResponseStream } from "./response-stream.js";
import type { InputItems, ModelResponse, ResponseDeleted, ResponseParams } from "./response-types.js";
import type { CallOptions, Transport } from "./transport.js";
import type { Answered } from "./types.js";

const PATH = "/v1/responses";

export interface ResponseOptions extends CallOptions {
  /** Responses belong to the API key and to the salt that they were made with. */
  cacheSalt?: string;
}

export interface StreamOptions extends CallOptions {
  /** The response goes on when the connection is lost, and the stream takes it up again by itself. */
  resume?: boolean;
}

/** `client.responses`. */
export class Responses {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Return a whole response; with `background: true` at once, to be read with `get`. */
  create(params: ResponseParams, options?: CallOptions): Promise<ModelResponse> {
    return this.#transport.send("POST", PATH, params, options);
  }

  /**
   * Return a stream of events; the request is sent when it is first read.
   *
   * With `resume` (or `background: true`) a lost connection is taken up again behind the last event, without a gap.
   */
  stream(params: ResponseParams, options: StreamOptions = {}): ResponseStream {
    const { resume, ...call } = options;
    const body = { ...params, stream: true, ...(resume ? { stream_options: { resume } } : {}) };
    const salt = params.cache_salt;
    const { idempotencyKey: _, ...again } = call;
    const reopen: Reopen = (id, after) => this.#open(id, after, salt, again);
    return new ResponseStream(
      () => this.#transport.open("POST", PATH, body, call),
      resume || params.background ? reopen : undefined,
      this.#transport.maxRetries(call),
    );
  }

  /** Return the events behind number `after` of a response that goes on, as a stream of its own. */
  resume(id: string, after = -1, options: ResponseOptions = {}): ResponseStream {
    const { cacheSalt, ...call } = options;
    const reopen: Reopen = (again, behind) => this.#open(again, behind, cacheSalt, call);
    return new ResponseStream(() => reopen(id, after), reopen, this.#transport.maxRetries(call), after);
  }

  /**
   * Open a WebSocket for several turns. In a browser the server must be one without API keys, because a page
   * cannot send them with a WebSocket. Node has WebSockets from version 22 on; before that, give a class.
   */
  connect(options: { webSocket?: WebSocketClass } = {}): Promise<ResponseSocket> {
    const { url, apiKey } = this.#transport.socketPlace(PATH);
    return ResponseSocket.open(url, apiKey, options.webSocket ?? (WebSocket as unknown as WebSocketClass));
  }

  /** Return a stored response, or a running one as it stands. */
  get(id: string, options?: ResponseOptions): Promise<ModelResponse> {
    return this.#transport.send("GET", place(id, "", { cache_salt: options?.cacheSalt }), undefined, options);
  }

  /** End a response in the background; what it said until then stays. */
  cancel(id: string, options?: ResponseOptions): Promise<ModelResponse> {
    return this.#transport.send("POST", place(id, "/cancel", { cache_salt: options?.cacheSalt }), undefined, options);
  }

  /** Forget a response. */
  delete(id: string, options?: ResponseOptions): Promise<ResponseDeleted> {
    return this.#transport.send("DELETE", place(id, "", { cache_salt: options?.cacheSalt }), undefined, options);
  }

  /** Return what a response was given, page by page. */
  inputItems(
    id: string,
    page: { order?: "asc" | "desc"; after?: string; limit?: number } = {},
    options?: ResponseOptions,
  ): Promise<InputItems> {
    const { order, after, limit } = page;
    const fields = { order, after, limit: limit?.toString(), cache_salt: options?.cacheSalt };
    return this.#transport.send("GET", place(id, "/input_items", fields), undefined, options);
  }

  /** Return how many tokens such a request's prompt has. */
  async countTokens(params: ResponseParams, options?: CallOptions): Promise<number> {
    const path = `${PATH}/input_tokens`;
    const counted = await this.#transport.send<Answered & { input_tokens: number }>("POST", path, params, options);
    return counted.input_tokens;
  }

  #open(id: string, after: number, salt: string | undefined, options: CallOptions) {
    const starting_after = after < 0 ? undefined : after.toString();
    const path = place(id, "", { stream: "true", starting_after, cache_salt: salt });
    return this.#transport.open("GET", path, undefined, options);
  }
}

function place(id: string, rest: string, fields: Record<string, string | undefined>): string {
  return `${PATH}/${encodeURIComponent(id)}${rest}${query(fields)}`;
}
