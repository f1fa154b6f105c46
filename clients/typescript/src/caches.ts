// The prompt cache by name: compute ahead, pin, list, explain, delete (`/v1/caches`).

import { query } from "./query.js";
import type { CallOptions, Transport } from "./transport.js";
import type { CacheDeleted, CacheExplanation, CacheList, NamedCache, PromptParams } from "./types.js";

const PATH = "/v1/caches";

/** A prompt to keep. */
export interface CreateCacheParams extends PromptParams {
  name: string;
  /** How long it is kept after its last use: "30m", "72h", "7d", or seconds. */
  ttl?: string | number;
  pinned?: boolean;
}

export interface NamedOptions extends CallOptions {
  /** Names belong to the API key and to this. */
  cacheSalt?: string;
}

/** `client.caches`. */
export class Caches {
  readonly #transport: Transport;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Compute a prompt (`messages` or `prompt`) and keep it by name, instead of what had the name. */
  create(params: CreateCacheParams, options?: CallOptions): Promise<NamedCache> {
    return this.#transport.send("POST", PATH, params, options);
  }

  /** Return what is named, and the prompts that were answered lately. */
  list(options?: NamedOptions): Promise<CacheList> {
    return this.#transport.send("GET", PATH + query({ cache_salt: options?.cacheSalt }), undefined, options);
  }

  /** Return one; `NotFoundError` if there is none of that name. */
  get(name: string, options?: NamedOptions): Promise<NamedCache> {
    return this.#transport.send("GET", named(name, options), undefined, options);
  }

  /** Keep it whatever happens: it neither expires nor gives way. */
  pin(name: string, options?: NamedOptions): Promise<NamedCache> {
    return this.#act(name, "pin", options);
  }

  /** Let it expire again. */
  unpin(name: string, options?: NamedOptions): Promise<NamedCache> {
    return this.#act(name, "unpin", options);
  }

  /** Compute what is missing of it, and load it. */
  prewarm(name: string, options?: NamedOptions): Promise<NamedCache> {
    return this.#act(name, "prewarm", options);
  }

  /** Return what would be reused of a prompt now, and why not more; nothing is computed. */
  explain(params: PromptParams, options?: CallOptions): Promise<CacheExplanation> {
    return this.#transport.send("POST", `${PATH}/explain`, params, options);
  }

  /** Erase the prompt and the answers to it, in memory and on disk. */
  delete(name: string, options?: NamedOptions): Promise<CacheDeleted> {
    return this.#transport.send("DELETE", named(name, options), undefined, options);
  }

  /** Erase every prompt of that key, named or answered, pinned or not. */
  deleteByKey(promptCacheKey: string, options?: NamedOptions): Promise<CacheDeleted> {
    const path = PATH + query({ prompt_cache_key: promptCacheKey, cache_salt: options?.cacheSalt });
    return this.#transport.send("DELETE", path, undefined, options);
  }

  #act(name: string, act: string, options?: NamedOptions): Promise<NamedCache> {
    const fields = options?.cacheSalt === undefined ? {} : { cache_salt: options.cacheSalt };
    return this.#transport.send("POST", `${PATH}/${encodeURIComponent(name)}/${act}`, fields, options);
  }
}

function named(name: string, options?: NamedOptions): string {
  return `${PATH}/${encodeURIComponent(name)}${query({ cache_salt: options?.cacheSalt })}`;
}
