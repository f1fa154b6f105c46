// Whether a failed attempt is tried again, and when. Knows status codes and headers, not connections.

const RETRIED = new Set([408, 429, 500, 502, 503, 504]);

/** How a client retries. */
export interface RetryPolicy {
  /** Attempts after the first. */
  maxRetries: number;
  /** Doubles with each attempt, where the server does not say how long. */
  firstWaitMs: number;
  /** Of the client's own waits. */
  maxWaitMs: number;
  /** A server that asks for more is not waited for: the error is thrown at once. */
  maxServerWaitMs: number;
  /** Share of a wait that is drawn at random, so that clients do not come back together. */
  jitter: number;
  /** From 0 to 1. */
  random: () => number;
  /** Milliseconds since the epoch: `Retry-After` may be a date. */
  now: () => number;
}

export const DEFAULT_RETRY: Readonly<RetryPolicy> = {
  maxRetries: 2,
  firstWaitMs: 500,
  maxWaitMs: 8000,
  maxServerWaitMs: 60_000,
  jitter: 0.25,
  random: Math.random,
  now: Date.now,
};

/** Return the wait after a failed attempt (0 = the first), undefined to give up. No status = no answer came. */
export function waitMs(
  policy: RetryPolicy,
  attempt: number,
  status: number | undefined,
  headers: Headers,
): number | undefined {
  if (attempt >= policy.maxRetries) return undefined;
  const told = headers.get("x-should-retry");
  if (told === "false") return undefined;
  if (told !== "true" && status !== undefined && !RETRIED.has(status)) return undefined;
  const asked = askedMs(policy, headers);
  if (asked === undefined) {
    // Less, never more: the cap stays the cap.
    const base = Math.min(policy.firstWaitMs * 2 ** attempt, policy.maxWaitMs);
    return base * (1 - policy.jitter * policy.random());
  }
  if (asked > policy.maxServerWaitMs) return undefined;
  // More, never less: before that the server would refuse again.
  return asked * (1 + policy.jitter * policy.random());
}

function askedMs(policy: RetryPolicy, headers: Headers): number | undefined {
  const ms = number(headers.get("retry-after-ms"));
  if (ms !== undefined) return Math.max(0, ms);
  const after = headers.get("retry-after");
  const seconds = number(after);
  if (seconds !== undefined) return Math.max(0, seconds * 1000);
  const at = after === null ? NaN : Date.parse(after);
  return Number.isNaN(at) ? undefined : Math.max(0, at - policy.now());
}

function number(text: string | null): number | undefined {
  const value = text === null || !text.trim() ? NaN : Number(text);
  return Number.isNaN(value) ? undefined : value;
}
