"""What turns cost, and what they leave behind: in the proxy's own core without sockets, and behind Envoy."""
