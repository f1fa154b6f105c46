"""Model files: fetching them, and opening them as config, weights, vocabulary and chat template."""
