// What a chat stream and a tool loop tell while they run. `choice` is 0 unless `n` is more than 1.

import type { CacheDiagnostics, ToolCall, Usage } from "./types.js";

/** A piece of the answer's text. */
export interface ContentDelta {
  type: "content_delta";
  choice: number;
  text: string;
}

/** A piece of what the model thinks before it answers. */
export interface ReasoningDelta {
  type: "reasoning_delta";
  choice: number;
  text: string;
}

/** The model calls a tool; its arguments follow. */
export interface ToolCallBegun {
  type: "tool_call_begun";
  choice: number;
  index: number;
  id: string;
  name: string;
}

/** A piece of a call's arguments: JSON text, cut anywhere. */
export interface ToolArgumentsDelta {
  type: "tool_arguments_delta";
  choice: number;
  index: number;
  text: string;
}

/** A call is complete. */
export interface ToolCallDone {
  type: "tool_call_done";
  choice: number;
  index: number;
  call: ToolCall;
}

/** A choice has come to its end. */
export interface ChoiceDone {
  type: "choice_done";
  choice: number;
  finish_reason: string;
}

/** What the request took, and what the prompt cache did for it. */
export interface UsageReport {
  type: "usage";
  usage: Usage;
  prompt_cache_diagnostics: CacheDiagnostics | undefined;
}

export type ChatEvent =
  | ContentDelta
  | ReasoningDelta
  | ToolCallBegun
  | ToolArgumentsDelta
  | ToolCallDone
  | ChoiceDone
  | UsageReport;

/** A tool's function begins to run. */
export interface ToolStarted {
  type: "tool_started";
  call: ToolCall;
}

/** A tool's function has ended. */
export interface ToolFinished {
  type: "tool_finished";
  call: ToolCall;
  /** What the model is told. */
  content: string;
  isError: boolean;
  ms: number;
}

export type ToolLoopEvent = ChatEvent | ToolStarted | ToolFinished;
