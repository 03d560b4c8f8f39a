"""The load generator over HTTP: conversations against any OpenAI-compatible endpoint, one record a request."""
