"""The workers: what they are, what state they are in, and which prefixes they hold."""
