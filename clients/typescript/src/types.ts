// What is sent and what the server answers, by the names on the wire. Newer servers may add fields.

export interface FunctionCall {
  name: string;
  /** JSON text. */
  arguments: string;
}

/** A call that the model asks for. */
export interface ToolCall {
  id: string;
  type: "function";
  function: FunctionCall;
}

export interface ContentPart {
  type: string;
  text?: string;
  prompt_cache_breakpoint?: { mode: "explicit" };
}

/** One message of a request; the messages of answers are such, too. */
export interface RequestMessage {
  role: string;
  content?: string | ContentPart[] | null;
  name?: string;
  reasoning_content?: string | null;
  refusal?: string | null;
  tool_calls?: ToolCall[];
  tool_call_id?: string;
}

/** A message of the model. */
export interface ChatMessage extends RequestMessage {
  content: string | null;
}

/** Tokens of one request. */
export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details?: { cached_tokens: number; cache_write_tokens?: number };
  completion_tokens_details?: { reasoning_tokens: number };
}

/** Whether the prompt cache was hit, and if not, why. Times are seconds since the epoch. */
export interface CacheDiagnostics {
  type: "cache_hit" | "cache_miss" | "comparison_response_not_found" | "unavailable";
  reason?: string;
  cache_missed_tokens?: number;
  comparison_reusable_tokens?: number | null;
  cached_tokens?: number;
  /** Reused tokens by where they came from: device, host, disk, shared. */
  sources?: Record<string, number>;
  created_at?: number;
  age_s?: number;
  expires_at?: number;
  ttl_s?: number;
  load_s?: number;
  divergence?: {
    compared_with: string;
    token_offset: number;
    message_index: number | null;
    role: string | null;
    what: string;
  };
  normalised?: unknown[];
}

export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[] | null;
  top_logprobs: Omit<TokenLogprob, "top_logprobs">[];
}

export interface Logprobs {
  content: TokenLogprob[] | null;
}

export interface ChatChoice {
  index: number;
  message: ChatMessage;
  finish_reason: string | null;
  stop_reason?: number | string | null;
  logprobs?: Logprobs | null;
  token_ids?: number[];
}

/** What all answers have besides their body. */
export interface Answered {
  /** The answer's `x-request-id`, as the server's log has it. */
  request_id?: string;
}

/** What the answers of both generation endpoints have. */
export interface Generated extends Answered {
  id: string;
  model: string;
  created: number;
  system_fingerprint?: string;
  usage?: Usage | null;
  prompt_cache_diagnostics?: CacheDiagnostics;
  prompt_token_ids?: number[];
  warnings?: string[];
}

/** A whole chat completion. */
export interface ChatAnswer extends Generated {
  choices: ChatChoice[];
}

export interface CompletionChoice {
  index: number;
  text: string;
  finish_reason: string | null;
  stop_reason?: number | string | null;
  token_ids?: number[];
}

/** A whole text completion. */
export interface CompletionAnswer extends Generated {
  choices: CompletionChoice[];
}

export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: string;
  function?: { name?: string; arguments?: string };
}

/** One event of a chat stream, as it is sent. */
export interface ChatChunk extends Generated {
  choices: {
    index: number;
    delta: {
      role?: string;
      content?: string | null;
      reasoning_content?: string | null;
      refusal?: string | null;
      tool_calls?: ToolCallDelta[];
    };
    finish_reason: string | null;
    stop_reason?: number | string | null;
    logprobs?: Logprobs | null;
    token_ids?: number[];
  }[];
}

export interface Model {
  id: string;
  created: number;
  owned_by: string;
  root?: string | null;
  max_model_len?: number;
}

export interface ModelList extends Answered {
  data: Model[];
}

/** A prompt that is kept by name. Times are seconds since the epoch. */
export interface NamedCache extends Answered {
  name: string;
  model: string;
  created_at: number;
  tokens: number;
  cached_tokens: number;
  sources: Record<string, number>;
  bytes: number;
  pinned: boolean;
  /** null = pinned, or nothing of it is kept below the device. */
  expires_at: number | null;
  /** Why not more of the prompt is cached. */
  ends_with: string | null;
  prompt_cache_key: string | null;
  /** What computing it took, where this call has computed it. */
  usage?: Usage;
}

export interface CacheList extends Answered {
  data: NamedCache[];
  /** Prompts that were answered lately. */
  prompts: { id: string; model: string; created_at: number; tokens: number; prompt_cache_key: string | null }[];
}

/** What would be reused of a prompt, and why not more. */
export interface CacheExplanation extends Answered {
  model: string;
  prompt: {
    tokens: number;
    block_tokens: number;
    cached_tokens: number;
    sources: Record<string, number>;
    bytes: number;
    created_at: number | null;
    expires_at: number | null;
    pinned: boolean;
    ends_with: string | null;
  };
  prompt_cache_diagnostics: CacheDiagnostics;
}

/** What a chat request would take now. */
export interface ChatEstimate extends Answered {
  model: string;
  prompt_tokens: number;
  cached_tokens: number;
  sources: Record<string, number>;
  queue_s: number;
  compute_s: number;
  /** The sum of the two. */
  time_to_first_token_s: number;
  prompt_cache_diagnostics: CacheDiagnostics;
  warnings?: string[];
}

export interface CacheDeleted extends Answered {
  deleted_tokens: number;
  deleted_prompts: number;
  name?: string;
}

/** How a request steers the prompt cache. */
export interface PromptCacheParams {
  prompt_cache_options?: {
    /** How long the prompt is kept after its last use: "30m", "72h", "7d", or seconds. */
    ttl?: string | number;
    mode?: "implicit" | "explicit";
    /** The earlier response that the diagnostics compare with. */
    comparison_response_id?: string;
    prewarm?: boolean;
    normalise?: boolean;
  };
  prompt_cache_key?: string;
  prompt_cache_retention?: "in_memory" | "24h";
  cache_salt?: string;
}

/** Fields of both generation endpoints; docs/api.md describes them. Others are sent as they are. */
export interface SamplingParams extends PromptCacheParams {
  /** Without it, the server's main model. */
  model?: string;
  n?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  logit_bias?: Record<string, number>;
  seed?: number;
  stop?: string | string[];
  min_tokens?: number;
  max_tokens?: number;
  return_token_ids?: boolean;
  priority?: number;
  [field: string]: unknown;
}

/** A request of chat completions. */
export interface ChatParams extends SamplingParams {
  messages: RequestMessage[];
  max_completion_tokens?: number;
  logprobs?: boolean;
  top_logprobs?: number;
  response_format?: Record<string, unknown>;
  tools?: Record<string, unknown>[];
  tool_choice?: string | Record<string, unknown>;
  parallel_tool_calls?: boolean;
  reasoning_effort?: string;
  chat_template_kwargs?: Record<string, unknown>;
}

/** A request of text completions. */
export interface CompletionParams extends SamplingParams {
  prompt: string | number[];
  logprobs?: number;
  echo?: boolean;
}

/** A prompt by itself, for the calls of the prompt cache: `messages` or `prompt`. */
export interface PromptParams extends PromptCacheParams {
  model?: string;
  messages?: RequestMessage[];
  prompt?: string | number[];
  chat_template_kwargs?: Record<string, unknown>;
  add_generation_prompt?: boolean;
}
