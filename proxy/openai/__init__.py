"""The bodies and events of OpenAI's and Anthropic's APIs as values."""
