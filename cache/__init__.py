"""The life of KV blocks: pool, prefix tree, tiers. No text, no sampling, no HTTP."""
