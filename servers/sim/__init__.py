"""The simulated engine: towards a proxy it behaves as a vLLM server does, without a model or a GPU.

`requests` turns a body into a generation, `scheduler` runs generations in steps over the prefix cache of `blocks`,
`handoffs` pins what P finished until D has pulled it through the `side_channel`, `answers` makes the text out of the
KV that is really held, and `engine` is the asyncio shell around them that `server` puts behind HTTP.
"""
