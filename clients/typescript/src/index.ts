// The TypeScript client of an Artesian server: fetch and nothing else, in Node and in browsers.

export { Caches, type CreateCacheParams, type NamedOptions } from "./caches.js";
export { ChatStream } from "./chat-stream.js";
export { Chat, Client } from "./client.js";
export {
  APIConnectionError,
  APIError,
  APIResponseError,
  APIStatusError,
  APITimeoutError,
  AuthenticationError,
  BadRequestError,
  ConflictError,
  type ErrorObject,
  InternalServerError,
  NotFoundError,
  PermissionDeniedError,
  RateLimitError,
  RequestTooLargeError,
  ServiceUnavailableError,
  StreamError,
  ToolRoundsExceeded,
  UnprocessableEntityError,
} from "./errors.js";
export type * from "./events.js";
export { ResponseSocket, type WebSocketClass } from "./response-socket.js";
export { ResponseStream } from "./response-stream.js";
export type * from "./response-types.js";
export { outputText } from "./response-types.js";
export { type ResponseOptions, Responses, type StreamOptions } from "./responses.js";
export type { RetryPolicy } from "./retry.js";
export type { ToolChatParams, ToolLoopOptions, ToolRun } from "./tool-loop.js";
export { type AnyTool, tool, type Tool, type ToolContext, type ToolLimits } from "./tools.js";
export type { CallOptions, ClientOptions } from "./transport.js";
export type * from "./types.js";
