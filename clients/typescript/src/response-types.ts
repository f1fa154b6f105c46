// What `/v1/responses` takes, answers and streams, by the names on the wire.

import type { Answered, CacheDiagnostics, SamplingParams } from "./types.js";

/** One item of an input; the items of an earlier output are such, too. */
export interface InputItem {
  type?: string;
  role?: string;
  content?: unknown;
  [field: string]: unknown;
}

/** A request of responses; docs/api.md describes the fields. */
export interface ResponseParams extends SamplingParams {
  input?: string | InputItem[];
  instructions?: string;
  /** Goes on from that response. */
  previous_response_id?: string;
  store?: boolean;
  background?: boolean;
  max_output_tokens?: number;
  include?: string[];
  text?: Record<string, unknown>;
  reasoning?: Record<string, unknown>;
  tools?: Record<string, unknown>[];
  tool_choice?: string | Record<string, unknown>;
  parallel_tool_calls?: boolean;
  metadata?: Record<string, string>;
}

/** One item of a response; `type` says which fields count. */
export interface OutputItem extends InputItem {
  type: "message" | "reasoning" | "function_call" | "custom_tool_call";
  id: string;
  status?: string;
  content?: { type: string; text: string; logprobs?: unknown[] }[];
  call_id?: string;
  name?: string;
  /** Of a function call: JSON text. */
  arguments?: string;
  /** Of a custom tool's call. */
  input?: string;
}

/** A response as it stands. */
export interface ModelResponse extends Answered {
  id: string;
  /** Before its end `queued` and `in_progress`. */
  status: "queued" | "in_progress" | "completed" | "incomplete" | "failed" | "cancelled";
  model: string;
  created_at: number;
  output: OutputItem[];
  error?: { code: string; message: string } | null;
  incomplete_details?: { reason: string } | null;
  previous_response_id?: string | null;
  background?: boolean;
  usage?: {
    input_tokens: number;
    output_tokens: number;
    total_tokens: number;
    input_tokens_details?: { cached_tokens: number };
  } | null;
  prompt_cache_diagnostics?: CacheDiagnostics;
  metadata?: Record<string, string>;
  warnings?: string[];
}

/** One event of a response's stream; `type` says which fields count. */
export interface ResponseEvent {
  /** `response.output_text.delta`, `response.completed`, ... */
  type: string;
  sequence_number: number;
  delta?: string;
  output_index?: number;
  content_index?: number;
  item_id?: string;
  item?: OutputItem;
  text?: string;
  name?: string;
  arguments?: string;
  response?: ModelResponse;
}

/** A page of what a response was given. */
export interface InputItems extends Answered {
  data: InputItem[];
  has_more: boolean;
  last_id: string | null;
}

export interface ResponseDeleted extends Answered {
  id: string;
  deleted: boolean;
}

/** Return the text of all messages of a response. */
export function outputText(response: ModelResponse): string {
  const messages = response.output.filter((item) => item.type === "message");
  return messages.flatMap((item) => (item.content ?? []).map((part) => part.text)).join("");
}
