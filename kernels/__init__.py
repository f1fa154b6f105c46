"""Device backends: tensors, shapes, bytes. No requests, no policy, no models."""
