"""Programs that measure and compare, one folder a question; `network` uses the clients of `soak`, `recognition` the
routers of `overhead`, else none another."""
