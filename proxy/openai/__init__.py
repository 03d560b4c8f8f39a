"""Request bodies, answers and stream events of OpenAI's and Anthropic's APIs: parsed, edited and passed on."""
