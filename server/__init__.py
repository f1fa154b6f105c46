"""Protocols and sockets. No torch, no blocks, no models."""
