"""gRPC over HTTP/2, the server's side, on connections of the proxy's own."""
