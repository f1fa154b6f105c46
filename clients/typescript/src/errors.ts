// Everything that a call can throw, with what the server said.

import type { RequestMessage } from "./types.js";

/** Root of all errors of this package. */
export class APIError extends Error {
  /** The server's `x-request-id`, as its log has it. */
  readonly requestId: string | undefined;

  constructor(message: string, requestId?: string, options?: ErrorOptions) {
    super(requestId === undefined ? message : `${message} (request ${requestId})`, options);
    this.name = new.target.name;
    this.requestId = requestId;
  }
}

/** The server could not be reached, or the connection broke before an answer. */
export class APIConnectionError extends APIError {}

/** The answer took longer than the timeout. */
export class APITimeoutError extends APIConnectionError {}

/** The answer is not what this client knows: another server, or a newer one. */
export class APIResponseError extends APIError {}

/** What OpenAI's error object says. */
export interface ErrorObject {
  message: string;
  type?: string | null;
  param?: string | null;
  code?: string | null;
}

/** The server answered with an error. */
export class APIStatusError extends APIError {
  readonly code: string | null;
  readonly param: string | null;
  readonly type: string | null;

  constructor(
    readonly status: number,
    said: ErrorObject,
    readonly headers: Headers,
  ) {
    super(said.message ? `${status}: ${said.message}` : `The server answered ${status}.`, requestIdOf(headers));
    this.code = said.code ?? null;
    this.param = said.param ?? null;
    this.type = said.type ?? null;
  }
}

/** 400: the request is wrong; `param` names the field. */
export class BadRequestError extends APIStatusError {}
/** 401: no API key, or an unknown one. */
export class AuthenticationError extends APIStatusError {}
/** 403: this key may not do that. */
export class PermissionDeniedError extends APIStatusError {}
/** 404: there is no such model, cache, response or path. */
export class NotFoundError extends APIStatusError {}
/** 409: it contradicts something that is there, such as an idempotency key with another body. */
export class ConflictError extends APIStatusError {}
/** 413: the body is larger than the server takes. */
export class RequestTooLargeError extends APIStatusError {}
/** 422: understood, but not to be done. */
export class UnprocessableEntityError extends APIStatusError {}
/** 429: this key is at one of its limits. */
export class RateLimitError extends APIStatusError {}
/** 500 and more: the server failed. */
export class InternalServerError extends APIStatusError {}
/** 503: the server is full or shuts down. */
export class ServiceUnavailableError extends InternalServerError {}

/** A stream ended in a fault; what came before it stays valid. */
export class StreamError extends APIError {
  readonly code: string | null;
  readonly param: string | null;

  constructor(message: string, requestId?: string, said?: ErrorObject, options?: ErrorOptions) {
    super(message, requestId, options);
    this.code = said?.code ?? null;
    this.param = said?.param ?? null;
  }
}

/** The model still calls tools after the last round; `messages` has the conversation so far. */
export class ToolRoundsExceeded extends APIError {
  constructor(
    message: string,
    readonly messages: RequestMessage[],
  ) {
    super(message);
  }
}

const BY_STATUS = new Map<number, typeof APIStatusError>([
  [400, BadRequestError],
  [401, AuthenticationError],
  [403, PermissionDeniedError],
  [404, NotFoundError],
  [409, ConflictError],
  [413, RequestTooLargeError],
  [422, UnprocessableEntityError],
  [429, RateLimitError],
  [503, ServiceUnavailableError],
]);

const SHOWN_BODY_CHARS = 200;

/** Return the error of an answer, whatever its body is. */
export function statusError(status: number, headers: Headers, body: string): APIStatusError {
  const kind = BY_STATUS.get(status) ?? (status >= 500 ? InternalServerError : APIStatusError);
  return new kind(status, errorObject(body), headers);
}

/** Return a response's request id. */
export function requestIdOf(headers: Headers): string | undefined {
  return headers.get("x-request-id") ?? undefined;
}

function errorObject(body: string): ErrorObject {
  try {
    const said: unknown = (JSON.parse(body) as { error?: unknown }).error;
    if (typeof said === "object" && said !== null && typeof (said as ErrorObject).message === "string") {
      return said as ErrorObject;
    }
  } catch {
    // a proxy's page
  }
  return { message: body.slice(0, SHOWN_BODY_CHARS) };
}
