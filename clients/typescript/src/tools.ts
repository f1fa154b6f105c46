// Functions that a model may call: how they are described, and how one round of calls is run.

import type { ToolLoopEvent } from "./events.js";
import type { ToolCall } from "./types.js";

/** What a running call knows. */
export interface ToolContext {
  call: ToolCall;
  /** Ends when the call takes too long, or the whole loop is cancelled. */
  signal: AbortSignal;
}

/** A function that the model may call. */
export interface Tool<A = Record<string, unknown>> {
  name: string;
  description?: string;
  /** JSON schema of the arguments: an object. */
  parameters?: Record<string, unknown>;
  /** Whether the server must hold the model to the schema; left out, the server decides. */
  strict?: boolean;
  /** Instead of the loop's limit for one call. */
  timeoutMs?: number;
  /** Checks and converts the arguments, as zod's `schema.parse` does; what it throws goes to the model. */
  parse?: (input: unknown) => A;
  /** Its result goes to the model: text as it is, everything else as JSON. */
  run: (args: A, context: ToolContext) => unknown;
}

/** A tool whatever its arguments are. */
export type AnyTool = Tool<any>;

/** Return the tool as it is, with its arguments' type inferred. */
export function tool<A = Record<string, unknown>>(definition: Tool<A>): Tool<A> {
  return definition;
}

/** What a tool loop may take. */
export interface ToolLimits {
  /** Requests to the model; 10 if nothing is said. */
  maxRounds?: number;
  /** For one call, where the tool has no limit of its own; one minute if nothing is said. */
  callTimeoutMs?: number;
  /** Calls that run at once; 8 if nothing is said. */
  concurrency?: number;
}

/** Return the entry of a request's `tools`. */
export function definition(entry: AnyTool): Record<string, unknown> {
  const described: Record<string, unknown> = {
    name: entry.name,
    parameters: entry.parameters ?? { type: "object", properties: {}, additionalProperties: false },
  };
  if (entry.description !== undefined) described["description"] = entry.description;
  if (entry.strict !== undefined) described["strict"] = entry.strict;
  return { type: "function", function: described };
}

/** Run a round's calls at once, within the limits; return what the model is told of each, in their order. */
export async function runCalls(
  calls: ToolCall[],
  tools: ReadonlyMap<string, AnyTool>,
  limits: Required<ToolLimits>,
  signal: AbortSignal,
  tell: (event: ToolLoopEvent) => void,
): Promise<string[]> {
  const results: string[] = [];
  let next = 0;
  const work = async (): Promise<void> => {
    while (next < calls.length) {
      const index = next++;
      const call = calls[index] as ToolCall;
      const began = Date.now();
      signal.throwIfAborted();
      tell({ type: "tool_started", call });
      const { content, isError } = await outcome(call, tools, limits.callTimeoutMs, signal);
      signal.throwIfAborted();
      tell({ type: "tool_finished", call, content, isError, ms: Date.now() - began });
      results[index] = content;
    }
  };
  await Promise.all(Array.from({ length: Math.min(limits.concurrency, calls.length) }, work));
  return results;
}

async function outcome(
  call: ToolCall,
  tools: ReadonlyMap<string, AnyTool>,
  timeoutMs: number,
  signal: AbortSignal,
): Promise<{ content: string; isError: boolean }> {
  const found = tools.get(call.function.name);
  if (found === undefined) {
    return failure(`There is no tool '${call.function.name}'; there are: ${[...tools.keys()].join(", ")}.`);
  }
  const limitMs = found.timeoutMs ?? timeoutMs;
  const controller = new AbortController();
  const stop = (): void => controller.abort(signal.reason);
  signal.addEventListener("abort", stop);
  let timer: ReturnType<typeof setTimeout> | undefined;
  try {
    const args = parsed(found, call.function.arguments);
    const late = new Error(`${found.name} took longer than ${limitMs} ms.`);
    // A function cannot be ended from outside: it is told by its signal, and no longer waited for.
    const ended = new Promise<never>((_, reject) => {
      controller.signal.addEventListener("abort", () => reject(controller.signal.reason as Error));
      timer = setTimeout(() => controller.abort(late), limitMs);
    });
    const running = Promise.resolve(found.run(args, { call, signal: controller.signal }));
    running.catch(() => undefined); // when it fails after it was given up
    return { content: resultText(await Promise.race([running, ended])), isError: false };
  } catch (error) {
    return failure(error instanceof Error ? error.message || error.name : String(error));
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
  }
}

function parsed(found: AnyTool, text: string): unknown {
  let input: unknown;
  try {
    input = JSON.parse(text || "{}");
  } catch {
    throw new Error(`The arguments of ${found.name} are not JSON.`);
  }
  if (found.parse !== undefined) return found.parse(input);
  if (typeof input !== "object" || input === null || Array.isArray(input)) {
    throw new Error(`The arguments of ${found.name} are no object.`);
  }
  return input;
}

/** Return a result as the model reads it. */
export function resultText(result: unknown): string {
  return typeof result === "string" ? result : (JSON.stringify(result) ?? "null");
}

function failure(message: string): { content: string; isError: boolean } {
  return { content: JSON.stringify({ error: message }), isError: true };
}
