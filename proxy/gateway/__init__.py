"""Turns that Envoy carries: an endpoint picker over gRPC, and Envoy's configuration."""
