"""Programs that measure and compare, one folder a question; `network` uses the clients of `soak`, else none another."""
