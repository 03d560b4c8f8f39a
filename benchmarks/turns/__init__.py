"""What turns cost, and what they leave behind: in the proxy's own core without sockets, behind Envoy, and replayed."""
