// Responses over a WebSocket: several turns on one connection, one after the other, each a message away.

import { APIConnectionError, APIResponseError, APIStatusError, statusError, StreamError } from "./errors.js";
import type { InputItem, ModelResponse, ResponseEvent, ResponseParams } from "./response-types.js";

const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);

/** The part of the standard WebSocket that is used; `headers` are Node's (undici's), browsers have none. */
export type WebSocketClass = new (url: string, options?: { headers: Record<string, string> }) => WebSocket;

/** What the server sends. */
type Frame = ResponseEvent & { status?: number; error?: { message?: string; code?: string | null } };

/** One connection. Its turns follow each other; leaving a turn before its end closes the connection. */
export class ResponseSocket {
  readonly #socket: WebSocket;
  readonly #frames: Frame[] = [];
  #wake: () => void = () => undefined;
  #closed: string | undefined;
  #isBusy = false;

  /** Connect; rejects if the server does not take it. */
  static open(url: string, apiKey: string | undefined, kind: WebSocketClass): Promise<ResponseSocket> {
    const socket = apiKey === undefined ? new kind(url) : new kind(url, { headers: { authorization: `Bearer ${apiKey}` } });
    return new Promise((resolve, reject) => {
      const opened = new ResponseSocket(socket);
      socket.addEventListener("open", () => resolve(opened), { once: true });
      socket.addEventListener("error", () => reject(new APIConnectionError("The WebSocket was not opened.")), {
        once: true,
      });
    });
  }

  private constructor(socket: WebSocket) {
    this.#socket = socket;
    socket.addEventListener("message", ({ data }) => this.#take(data));
    socket.addEventListener("close", ({ code, reason }) => {
      this.#closed ??= `The connection was closed (${code}${reason ? `, ${reason}` : ""}).`;
      this.#wake();
    });
  }

  /** Ask for a turn; yields its events up to the last. */
  create(params: ResponseParams): AsyncGenerator<ResponseEvent, ModelResponse> {
    return this.#turn({ ...params, type: "response.create" });
  }

  /** The turn that `steer` began: to be read when the one that was steered has been read to its end. */
  steered(): AsyncGenerator<ResponseEvent, ModelResponse> {
    return this.#turn(undefined);
  }

  async *#turn(message: Record<string, unknown> | undefined): AsyncGenerator<ResponseEvent, ModelResponse> {
    if (this.#isBusy) throw new Error("a turn runs on this connection: read it to its end first");
    this.#isBusy = true;
    let isDone = false;
    try {
      if (message !== undefined) this.#send(message);
      for (;;) {
        const event = await this.#next();
        const { response } = event;
        isDone = response !== undefined && TERMINAL.has(event.type);
        yield event;
        if (isDone) return response as ModelResponse;
      }
    } catch (error) {
      isDone ||= error instanceof APIStatusError; // a refused turn leaves the connection as it was
      throw error;
    } finally {
      this.#isBusy = false;
      if (!isDone) this.close();
    }
  }

  /** Ask for a turn and return its response. */
  async respond(params: ResponseParams): Promise<ModelResponse> {
    const turn = this.create(params);
    for (;;) {
      const next = await turn.next();
      if (next.done) return next.value;
    }
  }

  /** End the running turn with what it has said, and go on with this input in a turn of its own: `steered`. */
  steer(previousResponseId: string, input: string | InputItem[]): void {
    this.#send({ type: "response.steer", previous_response_id: previousResponseId, input });
  }

  /** Close the connection. */
  close(): void {
    this.#socket.close();
  }

  #send(message: Record<string, unknown>): void {
    if (this.#closed !== undefined) throw new StreamError(this.#closed);
    this.#socket.send(JSON.stringify(message));
  }

  #take(data: unknown): void {
    try {
      this.#frames.push(JSON.parse(String(data)));
    } catch {
      this.#closed = "The server sent a message that is not JSON.";
      this.close();
    }
    this.#wake();
  }

  async #next(): Promise<ResponseEvent> {
    while (this.#frames.length === 0) {
      if (this.#closed !== undefined) throw new StreamError(this.#closed);
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
    const frame = this.#frames.shift();
    if (typeof frame?.type !== "string") throw new APIResponseError("The server sent a message without a type.");
    if (frame.type === "error") {
      throw statusError(frame.status ?? 500, new Headers(), JSON.stringify({ error: frame.error ?? frame }));
    }
    return frame;
  }
}
