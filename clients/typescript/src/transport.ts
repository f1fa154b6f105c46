// Sends calls over fetch: attempts, the waits between them, typed errors and answers.

import {
  APIConnectionError,
  APIError,
  APIResponseError,
  APITimeoutError,
  requestIdOf,
  statusError,
} from "./errors.js";
import { DEFAULT_RETRY, type RetryPolicy, waitMs } from "./retry.js";
import type { Answered } from "./types.js";

/** What a client is made with. */
export interface ClientOptions {
  /** Of the server, with or without `/v1`. */
  baseURL?: string;
  /** Sent as a bearer token. */
  apiKey?: string;
  /** Until the next piece of an answer; a whole answer comes as one piece. */
  timeoutMs?: number;
  /** Attempts after the first; 2 if nothing is said. */
  maxRetries?: number;
  /** How retries are timed. */
  retry?: Partial<RetryPolicy>;
  /** Instead of the global one. */
  fetch?: typeof fetch;
  /** Waits between attempts; must end early, with the signal's reason, when the signal does. */
  sleep?: (ms: number, signal: AbortSignal | undefined) => Promise<void>;
}

/** What every call takes besides its fields. */
export interface CallOptions {
  /** Ends the call: in the server too. */
  signal?: AbortSignal | undefined;
  timeoutMs?: number | undefined;
  maxRetries?: number | undefined;
  headers?: Record<string, string> | undefined;
  /** The server answers a key once: a second call with it gets the same answer, or joins the running one. */
  idempotencyKey?: string | undefined;
}

const DEFAULT_URL = "http://127.0.0.1:8000";
const DEFAULT_TIMEOUT_MS = 600_000;

/** An answer whose body is read piece by piece; `close` ends the request. */
export interface OpenAnswer {
  headers: Headers;
  /** The next piece; undefined at the end. */
  read: () => Promise<Uint8Array | undefined>;
  close: () => void;
}

/** Sends calls. */
export class Transport {
  readonly #baseURL: string;
  readonly #apiKey: string | undefined;
  readonly #timeoutMs: number;
  readonly #policy: RetryPolicy;
  readonly #fetch: typeof fetch;
  readonly #sleep: (ms: number, signal: AbortSignal | undefined) => Promise<void>;

  constructor(options: ClientOptions) {
    this.#baseURL = (options.baseURL ?? DEFAULT_URL).replace(/\/+$/, "").replace(/\/v1$/, "");
    this.#apiKey = options.apiKey;
    this.#timeoutMs = options.timeoutMs ?? DEFAULT_TIMEOUT_MS;
    this.#policy = { ...DEFAULT_RETRY, ...options.retry };
    if (options.maxRetries !== undefined) this.#policy.maxRetries = options.maxRetries;
    this.#fetch = options.fetch ?? ((input, init) => fetch(input, init)); // a browser's needs its `this`
    this.#sleep = options.sleep ?? sleep;
  }

  /** Return the address of a WebSocket, and the key it is opened with. */
  socketPlace(path: string): { url: string; apiKey: string | undefined } {
    return { url: this.#baseURL.replace(/^http/, "ws") + path, apiKey: this.#apiKey };
  }

  /** Return how often such a call is tried again. */
  maxRetries(options: CallOptions): number {
    return options.maxRetries ?? this.#policy.maxRetries;
  }

  /** Send a call and return its answer. A body makes it a POST, unless the method says otherwise. */
  async send<T extends Answered>(
    method: string,
    path: string,
    body: unknown,
    options: CallOptions = {},
  ): Promise<T> {
    const answer = await this.open(method, path, body, options);
    const pieces: string[] = [];
    const decoder = new TextDecoder();
    try {
      for (let piece = await answer.read(); piece !== undefined; piece = await answer.read()) {
        pieces.push(decoder.decode(piece, { stream: true }));
      }
    } finally {
      answer.close();
    }
    const requestId = requestIdOf(answer.headers);
    let parsed: unknown;
    try {
      parsed = JSON.parse(pieces.join("") + decoder.decode());
    } catch (cause) {
      throw new APIResponseError(`The answer to ${path} is not JSON.`, requestId, { cause });
    }
    if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) {
      throw new APIResponseError(`The answer to ${path} is no object.`, requestId);
    }
    return (requestId === undefined ? parsed : { ...parsed, request_id: requestId }) as T;
  }

  /** Send a call and return its answer as soon as its head is there. It must be closed. */
  async open(method: string, path: string, body: unknown, options: CallOptions = {}): Promise<OpenAnswer> {
    const policy = { ...this.#policy, maxRetries: this.maxRetries(options) };
    for (let attempt = 0; ; attempt++) {
      const failed = await this.#attempt(method, path, body, options);
      if (!("error" in failed)) return failed;
      const wait = waitMs(policy, attempt, failed.status, failed.headers);
      if (wait === undefined) throw failed.error;
      await this.#sleep(wait, options.signal);
    }
  }

  async #attempt(
    method: string,
    path: string,
    body: unknown,
    options: CallOptions,
  ): Promise<OpenAnswer | { error: APIError; status?: number; headers: Headers }> {
    const deadline = new Deadline(options.timeoutMs ?? this.#timeoutMs, options.signal);
    try {
      const response = await this.#fetch(this.#baseURL + path, {
        method,
        headers: this.#headers(body, options),
        body: body === undefined ? null : JSON.stringify(body),
        signal: deadline.signal,
      });
      if (response.ok) {
        deadline.pause();
        return opened(response, deadline);
      }
      const said = await response.text();
      deadline.end();
      const { status, headers } = response;
      return { error: statusError(status, headers, said), status, headers };
    } catch (cause) {
      deadline.end();
      return { error: deadline.asError(cause), headers: new Headers() };
    }
  }

  #headers(body: unknown, options: CallOptions): Headers {
    const headers = new Headers({ accept: "application/json, text/event-stream" });
    if (body !== undefined) headers.set("content-type", "application/json");
    if (this.#apiKey !== undefined) headers.set("authorization", `Bearer ${this.#apiKey}`);
    if (options.idempotencyKey !== undefined) headers.set("idempotency-key", options.idempotencyKey);
    for (const [name, value] of Object.entries(options.headers ?? {})) headers.set(name, value);
    return headers;
  }
}

function opened(response: Response, deadline: Deadline): OpenAnswer {
  const reader = response.body?.getReader();
  return {
    headers: response.headers,
    async read() {
      deadline.restart();
      try {
        const piece = await reader?.read();
        return piece === undefined || piece.done ? undefined : piece.value;
      } catch (cause) {
        throw deadline.asError(cause, requestIdOf(response.headers));
      } finally {
        deadline.pause();
      }
    },
    close() {
      deadline.end();
      void reader?.cancel().catch(() => undefined);
    },
  };
}

/** Aborts when the time is over or the caller's signal says so, and knows which it was. */
class Deadline {
  readonly #controller = new AbortController();
  readonly #limitMs: number;
  readonly #callers: AbortSignal | undefined;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #isOver = false;

  constructor(limitMs: number, callers: AbortSignal | undefined) {
    this.#limitMs = limitMs;
    this.#callers = callers;
    callers?.addEventListener("abort", this.#abort);
    if (callers?.aborted) this.#abort();
    this.restart();
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  restart(): void {
    this.pause();
    this.#timer = setTimeout(() => {
      this.#isOver = true;
      this.#controller.abort();
    }, this.#limitMs);
  }

  pause(): void {
    clearTimeout(this.#timer);
  }

  end(): void {
    this.pause();
    this.#callers?.removeEventListener("abort", this.#abort);
  }

  /** Return our error for one of fetch's; throw the caller's own reason if it was the caller who ended it. */
  asError(cause: unknown, requestId?: string): APIConnectionError {
    if (this.#callers?.aborted) throw this.#callers.reason;
    if (this.#isOver) {
      return new APITimeoutError(`No answer within ${this.#limitMs} ms.`, requestId, { cause });
    }
    const what = cause instanceof Error && cause.cause instanceof Error ? cause.cause.message : String(cause);
    return new APIConnectionError(`The connection failed: ${what}`, requestId, { cause });
  }

  readonly #abort = (): void => this.#controller.abort();
}

/** Wait, unless the signal ends it first. */
export function sleep(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(signal?.reason as Error);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, ms);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}
