// The stream of a response: numbered events, taken up again behind the last one after a lost connection.

import { APIConnectionError, APIResponseError, requestIdOf, StreamError } from "./errors.js";
import type { ModelResponse, ResponseEvent } from "./response-types.js";
import { EventParser, type ServerEvent } from "./sse.js";
import type { OpenAnswer } from "./transport.js";

const TERMINAL = new Set(["response.completed", "response.incomplete", "response.failed"]);

/** Opens the events of a response behind a number. */
export type Reopen = (responseId: string, after: number) => Promise<OpenAnswer>;

/**
 * A stream to iterate over, once. Leaving the loop early ends the request in the server, unless it can be taken up
 * again: then it goes on for the server's grace time.
 */
export class ResponseStream implements AsyncIterable<ResponseEvent> {
  /** The response's id, once its first event has come. */
  responseId: string | undefined;
  /** The number of the last event: `responses.resume` goes on behind it. */
  lastNumber: number;
  readonly #send: () => Promise<OpenAnswer>;
  readonly #reopen: Reopen | undefined;
  readonly #maxReconnects: number;
  #requestId: string | undefined;
  #final: ModelResponse | undefined;
  #events: AsyncGenerator<ResponseEvent, void> | undefined;

  constructor(send: () => Promise<OpenAnswer>, reopen: Reopen | undefined, maxReconnects: number, after = -1) {
    this.#send = send;
    this.#reopen = reopen;
    this.#maxReconnects = maxReconnects;
    this.lastNumber = after;
  }

  [Symbol.asyncIterator](): AsyncGenerator<ResponseEvent, void> {
    return (this.#events ??= this.#read());
  }

  /** The pieces of the messages' text. */
  async *texts(): AsyncGenerator<string, void> {
    for await (const event of this) {
      if (event.type === "response.output_text.delta") yield event.delta ?? "";
    }
  }

  /** Read the rest, and return the finished response. */
  async response(): Promise<ModelResponse> {
    const events = this[Symbol.asyncIterator]();
    for (let next = await events.next(); !next.done; next = await events.next());
    if (this.#final === undefined) throw this.#broken();
    return this.#final;
  }

  async *#read(): AsyncGenerator<ResponseEvent, void> {
    let answer = await this.#send();
    for (let failures = 0; ; ) {
      const before = this.lastNumber;
      let lost: APIConnectionError | undefined;
      try {
        yield* this.#eventsOf(answer);
      } catch (cause) {
        if (!(cause instanceof APIConnectionError)) throw cause;
        lost = cause;
      } finally {
        answer.close();
      }
      if (this.#final !== undefined) return;
      failures = this.lastNumber > before ? 0 : failures + 1;
      if (this.#reopen === undefined || this.responseId === undefined || failures > this.#maxReconnects) {
        throw this.#broken(lost);
      }
      answer = await this.#reopen(this.responseId, this.lastNumber);
    }
  }

  async *#eventsOf(answer: OpenAnswer): AsyncGenerator<ResponseEvent, void> {
    this.#requestId = requestIdOf(answer.headers);
    const parser = new EventParser();
    for (let piece = await answer.read(); piece !== undefined; piece = await answer.read()) {
      for (const sent of parser.feed(piece)) yield this.#take(sent);
    }
  }

  #take(sent: ServerEvent): ResponseEvent {
    let event: ResponseEvent & { code?: string | null; message?: string };
    try {
      event = JSON.parse(sent.data);
    } catch (cause) {
      throw new APIResponseError("The stream has an event that is none of a response.", this.#requestId, { cause });
    }
    if (event.type === "error") {
      throw new StreamError(event.message ?? "", this.#requestId, { message: "", code: event.code ?? null });
    }
    this.lastNumber = Math.max(this.lastNumber, event.sequence_number);
    if (event.response !== undefined) {
      this.responseId = event.response.id;
      if (TERMINAL.has(event.type)) {
        this.#final = event.response;
        if (this.#requestId !== undefined) this.#final.request_id = this.#requestId;
      }
    }
    return event;
  }

  #broken(cause?: APIConnectionError): StreamError {
    const why = cause === undefined ? "" : ` ${cause.message}`;
    return new StreamError(`The stream broke off before its end.${why}`, this.#requestId, undefined, { cause });
  }
}
