"""The reference backend: plain torch in float32, one op after another, the truth for every other backend."""
